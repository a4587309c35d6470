// SPDX-License-Identifier: Apache-2.0
// Parameters of sampling of the requests of all slots: columns of Python's memory, an element for each slot, as
// pagoda/backend/sampling_table.py has them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "sampler.h"

namespace pagoda {

class SamplingTable {
   public:
    // `column(name)` is the address of a column's first element.
    template <class Column>
    SamplingTable(int64_t num_slots, int64_t vocab, Column column)
        : num_slots_(num_slots), vocab_(vocab), mask_words_((vocab + 31) / 32) {
        const auto bind = [&]<class T>(const T*& memory, const char* name) {
            memory = static_cast<const T*>(column(name));
        };
        bind(greedy_, "greedy");
        bind(scale_, "scale");
        bind(lowest_power_, "lowest_power");
        bind(top_k_, "top_k");
        bind(top_p_, "top_p");
        bind(typical_p_, "typical_p");
        bind(seed_, "seed");
        bind(position_, "position");
        bind(logprobs_, "logprobs");
        bind(masked_, "masked");
        bind(mask_, "mask");
        bind(stops_, "stops");
        bind(num_stops_, "num_stops");
        bind(bias_ids_, "bias_ids");
        bind(biases_, "biases");
        bind(num_biases_, "num_biases");
        bind(seen_, "seen");
        bind(counts_, "counts");
        bind(num_seen_, "num_seen");
        bind(repetition_, "repetition");
        bind(frequency_, "frequency");
        bind(presence_, "presence");
    }

    int64_t vocab() const { return vocab_; }

    // The parameters of a slot as they are now, for a row of logits.
    SamplingRow row(int64_t slot, float* logits) const {
        if (slot < 0 || slot >= num_slots_) throw std::out_of_range("Slot " + std::to_string(slot) + " does not exist.");
        SamplingRow row{};
        row.logits = logits;
        row.greedy = greedy_[slot];
        row.scale = scale_[slot];
        row.lowest_power = lowest_power_[slot];
        row.top_k = top_k_[slot];
        row.top_p = top_p_[slot];
        row.typical_p = typical_p_[slot];
        row.seed = seed_[slot];
        row.position = position_[slot];
        row.logprobs = logprobs_[slot];
        row.allowed = masked_[slot] ? mask_ + slot * mask_words_ : nullptr;
        row.stops = list<int64_t>(stops_[slot]);
        row.num_stops = num_stops_[slot];
        row.bias_ids = list<int64_t>(bias_ids_[slot]);
        row.biases = list<float>(biases_[slot]);
        row.num_biases = num_biases_[slot];
        row.seen = list<int64_t>(seen_[slot]);
        row.counts = list<float>(counts_[slot]);
        row.num_seen = num_seen_[slot];
        row.repetition = repetition_[slot];
        row.frequency = frequency_[slot];
        row.presence = presence_[slot];
        return row;
    }

   private:
    template <class T>
    static const T* list(uint64_t address) {
        return reinterpret_cast<const T*>(address);
    }

    int64_t num_slots_, vocab_, mask_words_;
    const int8_t *greedy_, *masked_;
    const float *scale_, *lowest_power_, *repetition_, *frequency_, *presence_;
    const uint64_t *top_p_, *typical_p_, *seed_, *position_;
    const int64_t *top_k_, *logprobs_, *num_stops_, *num_biases_, *num_seen_;
    const uint32_t* mask_;
    const uint64_t *stops_, *bias_ids_, *biases_, *seen_, *counts_;  // addresses of lists
};

}  // namespace pagoda
