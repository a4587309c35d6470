// SPDX-License-Identifier: Apache-2.0
// Parameters of sampling of the requests of all slots: columns of Python's memory, an element for each slot, as
// pagoda/backend/sampling_table.py has them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "sampler.h"

namespace pagoda {

class SamplingTable {
   public:
    // `column(name)` is the address of a column's first element.
    template <class Column>
    SamplingTable(int64_t num_slots, int64_t vocab, Column column)
        : num_slots_(num_slots), vocab_(vocab), mask_words_((vocab + 31) / 32) {
        mask_ = static_cast<const uint32_t*>(column("mask"));
#define PAGODA_NUMBER(type, name) name##_ = static_cast<const type*>(column(#name));
#define PAGODA_LIST(type, name) name##_ = static_cast<const uint64_t*>(column(#name));
        PAGODA_SAMPLING_COLUMNS(PAGODA_NUMBER, PAGODA_LIST)
#undef PAGODA_NUMBER
#undef PAGODA_LIST
    }

    // The columns' types by name, as the typecodes of Python's arrays.
    static std::vector<std::pair<const char*, char>> typecodes() {
        return {
#define PAGODA_NUMBER(type, name) {#name, typecode<type>()},
#define PAGODA_LIST(type, name) {#name, 'Q'},
            PAGODA_SAMPLING_COLUMNS(PAGODA_NUMBER, PAGODA_LIST)
#undef PAGODA_NUMBER
#undef PAGODA_LIST
        };
    }

    int64_t vocab() const { return vocab_; }

    // The parameters of a slot as they are now, for a row of logits.
    SamplingRow row(int64_t slot, float* logits) const {
        if (slot < 0 || slot >= num_slots_) throw std::out_of_range("Slot " + std::to_string(slot) + " does not exist.");
        SamplingRow row{};
        row.logits = logits;
        row.allowed = masked_[slot] ? mask_ + slot * mask_words_ : nullptr;
#define PAGODA_NUMBER(type, name) row.name = name##_[slot];
#define PAGODA_LIST(type, name) row.name = reinterpret_cast<const type*>(name##_[slot]);
        PAGODA_SAMPLING_COLUMNS(PAGODA_NUMBER, PAGODA_LIST)
#undef PAGODA_NUMBER
#undef PAGODA_LIST
        return row;
    }

   private:
    template <class T>
    static constexpr char typecode() {
        if (std::is_floating_point_v<T>) return 'f';
        if (sizeof(T) == 1) return 'b';
        return std::is_signed_v<T> ? 'q' : 'Q';
    }

    int64_t num_slots_, vocab_, mask_words_;
    const uint32_t* mask_;
#define PAGODA_NUMBER(type, name) const type* name##_;
#define PAGODA_LIST(type, name) const uint64_t* name##_;
    PAGODA_SAMPLING_COLUMNS(PAGODA_NUMBER, PAGODA_LIST)
#undef PAGODA_NUMBER
#undef PAGODA_LIST
};

}  // namespace pagoda
