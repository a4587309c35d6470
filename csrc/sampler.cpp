// SPDX-License-Identifier: Apache-2.0
#include "sampler.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "ops.h"
#include "philox.h"
#include "sampler_row.h"

namespace pagoda {

namespace {

// Tokens of a row that one thread looks at in one go.
constexpr int64_t kChunk = 64 * kSampleBlock;
// Elements of logits below which waking another thread takes longer than the work.
constexpr int64_t kWorthThreads = 1 << 15;
constexpr float kLowestPower = -40;
constexpr float kLogarithm = 1.44269504f;  // of e, to base 2

// One call of `sample`, made by one thread and run by all.
class Step {
   public:
    Step(const KernelTable& table, const SamplingRow* rows, int64_t n, int64_t vocab, const SamplingReport& report)
        : table_(table), rules_(rows), n_(n), vocab_(vocab), report_(report) {
        blocks_ = ceil_div(vocab, kSampleBlock);
        chunks_ = ceil_div(vocab, kChunk);
        for (int64_t i = 0; i < n; ++i) {
            const SamplingRow& rules = rows[i];
            reports_ |= rules.logprobs >= 0;
            changes_ |= rules.changes_logits();
            draws_ |= !rules.greedy;
            cuts_ |= !rules.greedy && rules.cuts(vocab);
            typical_ |= !rules.greedy && rules.typical();
        }
    }

    // Of memory to work in.
    size_t bytes() const {
        int64_t bytes = rows_bytes() + candidates_bytes();
        for (int64_t i = 0; i < n_; ++i) bytes += row_bytes(rules_[i]);
        return static_cast<size_t>(bytes);
    }

    // Gives all rows their parts of the memory.
    void place(void* memory) {
        rows_ = static_cast<Row*>(memory);
        candidates_ = reinterpret_cast<Candidate*>(at(memory, rows_bytes()));
        char* next = at(memory, rows_bytes() + candidates_bytes());
        const auto take = [&](int64_t bytes) {
            char* taken = next;
            next += bytes;
            return static_cast<void*>(taken);
        };
        for (int64_t i = 0; i < n_; ++i) place_row(rules_[i], rows_[i], take);
    }

    // All threads.
    void run() {
        each_chunk([&](Row& row, int64_t chunk) {
            row.finite[chunk] =
                table_.block_maxima(row.raw + first(chunk), size(chunk), row.raw_maxima + first_block(chunk));
        });
        each_row([&](Row& row) { look(row); });
        if (reports_ || changes_) {
            each_chunk([&](Row& row, int64_t chunk) { weigh_raw(row, chunk); });
        }
        if (changes_) {
            each_row([&](Row& row) {
                if (row.outcome == Outcome::drawn) change(row);
            });
            each_chunk([&](Row& row, int64_t chunk) {
                if (row.outcome != Outcome::drawn || !row.rules->changes_logits()) return;
                table_.block_maxima(row.logits + first(chunk), size(chunk), row.maxima + first_block(chunk));
            });
        }
        each_row([&](Row& row) {
            if (row.outcome == Outcome::drawn) prepare(row);
        });
        if (cuts_) {
            each_chunk([&](Row& row, int64_t chunk) {
                if (nucleus(row)) row.weights[chunk] = total(row, chunk, table_.total_weight);
            });
            each_row([&](Row& row) {
                if (nucleus(row)) leave_out_tail(row);
            });
            fill_buckets([&](const Row& row) { return row.draws() && row.rules->cuts(vocab_); });
            each_row([&](Row& row) {
                if (row.draws() && row.rules->cuts(vocab_)) cut(row);
            });
        }
        if (typical_) keep_typical();
        if (draws_) {
            each_chunk([&](Row& row, int64_t chunk) {
                if (row.draws()) row.weights[chunk] = total(row, chunk, table_.total_weight);
            });
        }
        each_row([&](Row& row) {
            if (row.draws()) draw(row);
            report(row);
        });
    }

   private:
    // ---- work

    int64_t first(int64_t chunk) const { return chunk * kChunk; }
    int64_t end(int64_t chunk) const { return std::min(vocab_, (chunk + 1) * kChunk); }
    int64_t size(int64_t chunk) const { return end(chunk) - first(chunk); }
    static int64_t first_block(int64_t chunk) { return chunk * (kChunk / kSampleBlock); }

    // Calls f(begin, end) with this thread's part of the chunks of all rows, numbered row by row.
    template <class F>
    void each_share(F f) const {
        const int64_t items = n_ * chunks_, threads = omp_get_num_threads(), own = omp_get_thread_num();
        f(items * own / threads, items * (own + 1) / threads);
#pragma omp barrier
    }

    template <class F>
    void each_chunk(F f) const {
        each_share([&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) f(rows_[item / chunks_], item % chunks_);
        });
    }

    template <class F>
    void each_row(F f) const {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n_; ++i) f(rows_[i]);
    }

    // Calls f(how, begin, end) for all tokens of blocks from `begin` to `end` in which some may count.
    template <class F>
    void each_piece(const Row& row, int64_t begin, int64_t end, F f) const {
        for (int64_t block = begin / kSampleBlock; block * kSampleBlock < end; ++block) {
            if (!row.reached(block)) continue;
            int64_t at = block * kSampleBlock;
            while ((block + 1) * kSampleBlock < end && row.reached(block + 1)) ++block;
            const int64_t stop = std::min(end, (block + 1) * kSampleBlock);
            while (at < stop) {
                int64_t until = stop;
                const Weighing how = row.weighing(at, until);
                f(how, at, until);
                at = until;
            }
        }
    }

    template <class Sum>
    int64_t total(const Row& row, int64_t chunk, Sum sum) const {
        int64_t result = 0;
        each_piece(row, first(chunk), end(chunk), [&](const Weighing& how, int64_t begin, int64_t stop) {
            result += sum(how, row.logits + begin, stop - begin);
        });
        return result;
    }

    // ---- memory

    // Copies of what is changed are needed where log-probabilities are of what was there before.
    static bool copies(const SamplingRow& rules) { return rules.logprobs >= 0 && rules.changes_logits(); }
    int64_t rows_bytes() const { return ceil_div(n_ * static_cast<int64_t>(sizeof(Row)), 64) * 64; }
    int64_t candidates_bytes() const {
        return ceil_div(omp_get_max_threads() * vocab_ * static_cast<int64_t>(sizeof(Candidate)), 64) * 64;
    }
    int64_t maxima_bytes() const { return ceil_div(blocks_ * 4, 64) * 64; }
    int64_t sums_bytes() const { return ceil_div(chunks_ * 8, 64) * 64; }
    int64_t logits_bytes() const { return ceil_div(vocab_ * 4, 64) * 64; }
    bool sorts(const SamplingRow& rules) const { return !rules.greedy && (rules.cuts(vocab_) || rules.typical()); }
    int64_t row_bytes(const SamplingRow& rules) const {
        int64_t bytes = maxima_bytes() + 4 * sums_bytes();
        if (copies(rules)) bytes += maxima_bytes() + logits_bytes();
        if (sorts(rules)) bytes += kBucketsBytes;
        return bytes;
    }

    template <class Take>
    void place_row(const SamplingRow& rules, Row& row, Take take) const {
        row = {};
        row.rules = &rules;
        row.raw = row.logits = rules.logits;
        row.raw_maxima = row.maxima = static_cast<float*>(take(maxima_bytes()));
        for (int64_t** sums : {&row.raw_weights, &row.weights, &row.products, &row.finite}) {
            *sums = static_cast<int64_t*>(take(sums_bytes()));
        }
        row.equal_end = row.distant_end = std::numeric_limits<int64_t>::max();
        if (copies(rules)) {
            row.maxima = static_cast<float*>(take(maxima_bytes()));
            row.logits = static_cast<float*>(take(logits_bytes()));
        }
        if (sorts(rules)) {
            row.buckets = static_cast<Bucket*>(take(kBucketsBytes));
            std::memset(row.buckets, 0, kBucketsBytes);
        }
    }

    // ---- logits and rules

    void look(Row& row) const {
        const bool finite = std::all_of(row.finite, row.finite + chunks_, [](int64_t ok) { return ok != 0; });
        row.outcome = finite ? Outcome::drawn : Outcome::not_finite;
        row.raw_highest = *std::max_element(row.raw_maxima, row.raw_maxima + blocks_);
    }

    static Weighing raw_weighing(const Row& row) {
        return {row.raw_highest, kLogarithm, kLowestPower, -INFINITY};
    }

    // Weighs logits for log-probabilities, and changes them where that is not a matter of few tokens.
    void weigh_raw(Row& row, int64_t chunk) const {
        if (row.outcome != Outcome::drawn) return;
        const int64_t begin = first(chunk);
        if (row.rules->logprobs >= 0) {
            row.raw_weights[chunk] = table_.total_weight(raw_weighing(row), row.raw + begin, size(chunk));
        }
        if (row.logits != row.raw) {
            std::memcpy(row.logits + begin, row.raw + begin, static_cast<size_t>(size(chunk)) * sizeof(float));
        }
        if (row.rules->allowed) {
            table_.forbid_unset(row.logits + begin, size(chunk), row.rules->allowed + begin / 32);
        }
    }

    static void change(Row& row) {
        const SamplingRow& rules = *row.rules;
        float* logits = row.logits;
        for (int64_t i = 0; i < rules.num_stops; ++i) logits[rules.stops[i]] = -INFINITY;
        for (int64_t i = 0; i < rules.num_biases; ++i) logits[rules.bias_ids[i]] += rules.biases[i];
        for (int64_t i = 0; i < rules.num_seen; ++i) {
            float& logit = logits[rules.seen[i]];
            if (rules.repetition != 1) logit = logit > 0 ? logit / rules.repetition : logit * rules.repetition;
            logit -= rules.counts[i] * rules.frequency;
            logit -= rules.counts[i] > 0 ? rules.presence : 0.0f;
        }
    }

    // Finds the highest logit, and the token if that is all.
    void prepare(Row& row) {
        const SamplingRow& rules = *row.rules;
        const float highest = *std::max_element(row.maxima, row.maxima + blocks_);
        if (highest == -INFINITY && rules.forbids_tokens()) {
            row.outcome = Outcome::nothing_allowed;
        } else if (!std::isfinite(highest)) {
            row.outcome = Outcome::overflown;
        } else if (rules.given >= 0) {
            row.token = rules.given;
        } else if (rules.greedy) {
            const int64_t block = std::find(row.maxima, row.maxima + blocks_, highest) - row.maxima;
            row.token = std::find(row.logits + block * kSampleBlock, row.logits + vocab_, highest) - row.logits;
        } else {
            row.how = {highest, rules.scale, rules.lowest_power, -INFINITY};
            // At least top_k tokens are no less than the top_k-th highest of blocks.
            if (rules.top_k > 0) row.how.lowest = high_bound(row.maxima, rules.top_k);
        }
    }

    Candidate* own_candidates() const { return candidates_ + omp_get_thread_num() * vocab_; }

    // The count-th highest of the maxima of blocks; -inf if there are fewer.
    float high_bound(const float* maxima, int64_t count) const {
        if (count > blocks_) return -INFINITY;
        auto* copy = reinterpret_cast<float*>(own_candidates());
        std::copy(maxima, maxima + blocks_, copy);
        std::nth_element(copy, copy + count - 1, copy + blocks_, std::greater<float>());
        return copy[count - 1];
    }

    // ---- the tokens to draw from

    // Sums up buckets of distances, for the rows that `wanted` says.
    template <class Wanted>
    void fill_buckets(Wanted wanted) const {
        each_share([&](int64_t begin, int64_t end) {
            while (begin < end) {
                const Row& row = rows_[begin / chunks_];
                const int64_t next = std::min(end, (begin / chunks_ + 1) * chunks_);
                if (wanted(row)) fill_buckets(row, first(begin % chunks_), this->end((next - 1) % chunks_));
                begin = next;
            }
        });
    }

    void fill_buckets(const Row& row, int64_t begin, int64_t end) const {
        Bucket own[kSampleBuckets] = {};
        each_block(row, begin, end, [&](int64_t, int64_t n, const WeighedTokens& tokens) {
            for (int64_t i = 0; i < n; ++i) {
                Bucket& bucket = own[tokens.buckets[i]];
                bucket.weight += tokens.weights[i];
                ++bucket.count;
            }
        });
        for (int b = 0; b < kSampleBuckets; ++b) {
            if (own[b].count == 0) continue;
            // Whole numbers: the order in which threads add them does not matter.
            std::atomic_ref(row.buckets[b].weight).fetch_add(own[b].weight, std::memory_order_relaxed);
            std::atomic_ref(row.buckets[b].count).fetch_add(own[b].count, std::memory_order_relaxed);
        }
    }

    // Calls f(block's first token, n, tokens) with the n tokens of blocks that count.
    template <class F>
    void each_block(const Row& row, int64_t begin, int64_t end, F f) const {
        WeighedTokens tokens;
        each_piece(row, begin, end, [&](const Weighing& how, int64_t at, int64_t stop) {
            for (; at < stop; at += kSampleBlock) {
                f(at, table_.weigh(how, row.logits + at, std::min(kSampleBlock, stop - at), tokens), tokens);
            }
        });
    }

    // Finds where the sum over tokens, from the nearest on, of weights or of ones reaches the goal, which all
    // together do. The tokens that equal the last one are kept all if they are counted, else as far as needed.
    template <class Key>
    Cut find_cut(Row& row, int64_t goal, bool counted, Key key_of_token) const {
        const auto amount = [=](const auto& part) { return counted ? int64_t{1} : part.weight; };
        int bucket = 0;
        int64_t weight = 0, reached = 0;
        for (;; ++bucket) {
            const Bucket& sums = row.buckets[bucket];
            const int64_t more = counted ? sums.count : sums.weight;
            if (reached + more >= goal) break;
            reached += more;
            weight += sums.weight;
        }
        Candidate* candidates = own_candidates();
        int64_t n = 0;
        row.how.first_bucket = static_cast<float>(bucket);
        row.how.bucket_end = static_cast<float>(bucket + 1);
        each_block(row, 0, vocab_, [&](int64_t begin, int64_t size, const WeighedTokens& tokens) {
            for (int64_t i = 0; i < size; ++i) {
                const int64_t token = begin + tokens.places[i];
                candidates[n++] = {key_of_token(token, tokens.distances[i]), static_cast<uint32_t>(token),
                                   tokens.weights[i]};
            }
        });
        row.how.first_bucket = 0;
        row.how.bucket_end = kSampleBuckets;
        for (int shift = 24; shift >= 0; shift -= 8) {
            Bucket digits[256] = {};
            for (int64_t i = 0; i < n; ++i) {
                Bucket& digit = digits[candidates[i].key >> shift & 255];
                digit.weight += candidates[i].weight;
                ++digit.count;
            }
            uint32_t digit = 255;
            for (;; --digit) {
                const int64_t more = counted ? digits[digit].count : digits[digit].weight;
                if (reached + more >= goal) break;
                reached += more;
                weight += digits[digit].weight;
            }
            int64_t left = 0;
            for (int64_t i = 0; i < n; ++i) {
                candidates[left] = candidates[i];
                left += (candidates[i].key >> shift & 255) == digit;
            }
            n = left;
        }
        Cut found{value_of(candidates[0].key)};
        int64_t i = 0;
        for (; i < n && (counted || reached < goal); ++i) {
            reached += amount(candidates[i]);
            weight += candidates[i].weight;
        }
        if (i < n) found.equal_end = candidates[i].token;
        found.weight = weight;
        return found;
    }

    // True for top-p of all tokens. What they add up to is found first: few have to be looked at then.
    static bool nucleus(const Row& row) {
        return row.draws() && row.rules->top_p < kCertain && row.rules->top_k == 0;
    }

    // Leaves out tokens so unlikely that even so many as there are would not add up to what top-p leaves out.
    void leave_out_tail(Row& row) const {
        row.total = std::accumulate(row.weights, row.weights + chunks_, int64_t{0});
        const int64_t least = (row.total - share_of(row.total, row.rules->top_p)) / vocab_;
        if (least == 0) return;
        // A little lower, as neither logarithms nor weights are exact.
        const float power = std::log2(static_cast<float>(least)) - kWeightBits - 0.01f;
        row.how.lowest_power = std::max(row.how.lowest_power, power);
    }

    // Leaves the tokens of top-k, and of these the ones of top-p.
    void cut(Row& row) const {
        const SamplingRow& rules = *row.rules;
        int64_t weight = 0, count = 0;
        for (int b = 0; b < kSampleBuckets; ++b) {
            weight += row.buckets[b].weight;
            count += row.buckets[b].count;
        }
        if (nucleus(row)) weight = row.total;
        const auto key = [&](int64_t token, float) { return key_of(row.logits[token]); };
        Cut found{row.how.lowest};
        if (rules.top_k > 0 && rules.top_k < count) {
            found = find_cut(row, rules.top_k, true, key);
            weight = found.weight;
        }
        if (rules.top_p < kCertain) found = find_cut(row, share_of(weight, rules.top_p), false, key);
        row.how.lowest = found.value;
        row.equal_end = found.equal_end;
    }

    // Leaves the tokens whose powers are nearest to their mean (Meister et al. 2022): -log p differs from the
    // entropy by as much as the power of a token from the mean power.
    void keep_typical() const {
        const auto wanted = [](const Row& row) { return row.draws() && row.rules->typical(); };
        each_chunk([&](Row& row, int64_t chunk) {
            if (!wanted(row)) return;
            row.weights[chunk] = total(row, chunk, table_.total_weight);
            row.products[chunk] = total(row, chunk, table_.total_product);
        });
        each_row([&](Row& row) {
            if (!wanted(row)) return;
            int64_t weight = 0, product = 0;
            for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
                weight += row.weights[chunk];
                product += row.products[chunk];
            }
            row.how.mean = static_cast<float>(static_cast<double>(product) / static_cast<double>(weight));
            row.total = weight;
            std::memset(row.buckets, 0, kBucketsBytes);
        });
        fill_buckets(wanted);
        each_row([&](Row& row) {
            if (!wanted(row)) return;
            // Nearer ones have higher keys.
            const Cut found = find_cut(row, share_of(row.total, row.rules->typical_p), false,
                                       [](int64_t, float distance) { return key_of(-distance); });
            row.how.farthest = -found.value;
            row.distant_end = found.equal_end;
        });
    }

    void draw(Row& row) const {
        int64_t all = 0;
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) all += row.weights[chunk];
        const uint64_t random = uniform(row.rules->seed, row.rules->position);
        auto left = static_cast<int64_t>(static_cast<unsigned __int128>(all) * random >> 53);
        int64_t chunk = 0;
        while (left >= row.weights[chunk]) left -= row.weights[chunk++];
        bool found = false;
        each_block(row, first(chunk), end(chunk), [&](int64_t begin, int64_t n, const WeighedTokens& tokens) {
            for (int64_t i = 0; i < n && !found; ++i) {
                found = left < tokens.weights[i];
                if (found) row.token = begin + tokens.places[i];
                left -= tokens.weights[i];
            }
        });
    }

    // ---- results

    void report(const Row& row) const {
        const int64_t index = &row - rows_, most = report_.most;
        int64_t* numbers = report_.numbers + index * (3 + most);
        numbers[0] = static_cast<int64_t>(row.outcome);
        numbers[1] = row.token;
        if (!row.reports()) return;
        int64_t weight = 0, rank = 1;
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) weight += row.raw_weights[chunk];
        const double total = std::log(std::ldexp(static_cast<double>(weight), -kWeightBits));
        const auto logprob = [&](int64_t token) {
            return static_cast<float>(static_cast<double>(row.raw[token]) - static_cast<double>(row.raw_highest) -
                                      total);
        };
        for (int64_t block = 0; block < blocks_; ++block) {
            const float own = row.raw[row.token];
            if (!(row.raw_maxima[block] > own)) continue;
            const int64_t begin = block * kSampleBlock;
            rank += table_.count_above(row.raw + begin, std::min(kSampleBlock, vocab_ - begin), own);
        }
        numbers[2] = rank;
        float* logprobs = report_.logprobs + index * (1 + most);
        logprobs[0] = logprob(row.token);
        const int64_t wanted = std::min(row.rules->logprobs, vocab_);
        const Candidate* top = likeliest(row, wanted);
        for (int64_t i = 0; i < wanted; ++i) {
            numbers[3 + i] = top[i].token;
            logprobs[1 + i] = logprob(top[i].token);
        }
    }

    // The tokens with the highest of the model's logits, of equal ones those of lower ids.
    const Candidate* likeliest(const Row& row, int64_t count) const {
        Candidate* candidates = own_candidates();
        if (count == 0) return candidates;
        const float bound = high_bound(row.raw_maxima, count);
        int64_t n = 0, equal = 0;
        for (int64_t block = 0; block < blocks_; ++block) {
            if (row.raw_maxima[block] < bound) continue;
            const int64_t end = std::min(vocab_, (block + 1) * kSampleBlock);
            for (int64_t token = block * kSampleBlock; token < end; ++token) {
                const float logit = row.raw[token];
                if (logit > bound || (logit == bound && equal++ < count)) {
                    candidates[n++] = {key_of(logit), static_cast<uint32_t>(token), 0};
                }
            }
        }
        std::partial_sort(candidates, candidates + count, candidates + n, [](const Candidate& a, const Candidate& b) {
            return a.key != b.key ? a.key > b.key : a.token < b.token;
        });
        return candidates;
    }

    const KernelTable& table_;
    const SamplingRow* rules_;
    int64_t n_, vocab_, blocks_, chunks_;
    SamplingReport report_;
    Row* rows_ = nullptr;
    Candidate* candidates_ = nullptr;
    bool reports_ = false, changes_ = false, draws_ = false, cuts_ = false, typical_ = false;
};

}  // namespace

void sample(const KernelTable& table, const SamplingRow* rows, int64_t n, int64_t vocab,
            const SamplingReport& report, Buffer& buffer) {
    Step step(table, rows, n, vocab, report);
    step.place(buffer.take(step.bytes()));
    in_team(n * vocab > kWorthThreads, [&] { step.run(); });
}

}  // namespace pagoda
