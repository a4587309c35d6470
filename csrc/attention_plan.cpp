// SPDX-License-Identifier: Apache-2.0
// Who computes what of a step's attention: tiles of queries, splits of contexts, and the splits that sequences share.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "ops.h"

namespace pagoda {

namespace {

// Query rows that share one reading of keys and values.
constexpr int kQueryRows = 48;
// A larger part of a thread's work than one in so many is shared out: threads may not all be equally fast.
constexpr int64_t kItemsPerThread = 16;
// Cached tokens that are read once less from which on it is worth meeting for.
constexpr int64_t kWorthSharing = kSplit / 2;
// Tries to find company for the tiles of which a split begins alike and goes on differently.
constexpr int kSharingRounds = 4;
constexpr int64_t kMaxRanks = 4096;

int64_t round_down(int64_t x, int64_t step) { return x / step * step; }

// Finds the tiles that begin in the same blocks, split by split: those that have a whole one in common are looked at in
// the next.
class SharedSplits {
   public:
    SharedSplits(const AttentionMetadata& metadata, AttentionPlan& plan) : metadata_(metadata), plan_(plan) {}

    void find() {
        std::vector<int64_t> candidates;
        for (size_t i = 0; i < plan_.tiles.size(); ++i) {
            // Full tiles read keys for enough rows.
            if (2 * plan_.rows_of(static_cast<int64_t>(i)) <= kQueryRows) {
                candidates.push_back(static_cast<int64_t>(i));
            }
        }
        if (candidates.size() < 2) return;
        std::vector<Found> open;
        group(candidates, -1, open);
        while (!open.empty()) {
            Found found = std::move(open.back());
            open.pop_back();
            share(found);
            if (found.end % plan_.parts.split == 0) group(found.tiles, found.end, open);
        }
    }

   private:
    struct Found {
        std::vector<int64_t> tiles;
        int64_t begin, end;
    };

    const AttentionPlan::Tile& tile(int64_t i) const { return plan_.tiles[static_cast<size_t>(i)]; }
    int32_t block(int64_t i, int64_t position) const {
        return metadata_.blocks_of(tile(i).sequence)[position / metadata_.shape.block_size];
    }

    // Tiles that have cached tokens from `begin` on in common, -1 for where each begins.
    void group(const std::vector<int64_t>& tiles, int64_t begin, std::vector<Found>& found) const {
        // By where they begin and the last block of the first kKeyTile tokens: those before it are mostly the same.
        std::vector<std::pair<std::pair<int64_t, int32_t>, int64_t>> keyed;
        for (const int64_t i : tiles) {
            const int64_t first = begin < 0 ? tile(i).begin : begin;
            if (first + kKeyTile > tile(i).end) continue;
            keyed.push_back({{first, block(i, first + kKeyTile - 1)}, i});
        }
        std::sort(keyed.begin(), keyed.end());
        for (size_t i = 0; i < keyed.size();) {
            size_t end = i;
            std::vector<int64_t> alike;
            for (; end < keyed.size() && keyed[end].first == keyed[i].first; ++end) alike.push_back(keyed[end].second);
            for (int round = 0; round < kSharingRounds && alike.size() > 1; ++round) {
                alike = take(alike, keyed[i].first.first, found);
            }
            i = end;
        }
    }

    // Of the tiles that have tokens in common with the first one, those for which most is gained; returns the others.
    std::vector<int64_t> take(const std::vector<int64_t>& alike, int64_t begin, std::vector<Found>& found) const {
        std::vector<std::pair<int64_t, int64_t>> ends;
        for (const int64_t i : alike) ends.push_back({-common_end(alike[0], i, begin), i});
        std::sort(ends.begin(), ends.end());
        int64_t best = 0, count = 0;
        for (size_t i = 1; i < ends.size(); ++i) {
            const int64_t gain = (-ends[i].first - begin) * static_cast<int64_t>(i);
            if (gain > best) best = gain, count = static_cast<int64_t>(i) + 1;
        }
        std::vector<int64_t> taken, others;
        for (size_t i = 0; i < ends.size(); ++i) {
            (static_cast<int64_t>(i) < count ? taken : others).push_back(ends[i].second);
        }
        if (count == 0) return {others.begin() + 1, others.end()};
        std::sort(taken.begin(), taken.end());
        if (best >= kWorthSharing) found.push_back({taken, begin, -ends[static_cast<size_t>(count) - 1].first});
        return others;
    }

    // Up to where two tiles lie in the same blocks, within the split, at a multiple of kKeyTile.
    int64_t common_end(int64_t one, int64_t other, int64_t begin) const {
        const int64_t size = metadata_.shape.block_size;
        const int64_t end = std::min({round_down(begin, plan_.parts.split) + plan_.parts.split, tile(one).end, tile(other).end});
        int64_t position = begin;
        while (position < end && block(one, position) == block(other, position)) position = round_down(position, size) + size;
        return round_down(std::min(position, end), kKeyTile);
    }

    // Items for as many tiles as one takes at a time.
    void share(const Found& found) {
        size_t begin = 0;
        while (begin < found.tiles.size()) {
            int rows = 0;
            size_t end = begin;
            for (; end < found.tiles.size() && rows + plan_.rows_of(found.tiles[end]) <= kQueryRows; ++end) {
                rows += plan_.rows_of(found.tiles[end]);
            }
            if (end - begin > 1) share(found, begin, end, rows);
            begin = end;
        }
    }

    void share(const Found& found, size_t begin, size_t end, int rows) {
        const auto split_of = [&](int64_t i) {
            return tile(i).first_split + found.begin / plan_.parts.split - tile(i).begin / plan_.parts.split;
        };
        const AttentionPlan::Item item{static_cast<int64_t>(plan_.members.size()), static_cast<int64_t>(end - begin), 0, 1,
                                       found.begin, found.end, split_of(found.tiles[begin]), false};
        for (int head = 0; head < metadata_.shape.num_kv_heads; ++head) {
            plan_.shared.push_back(item);
            plan_.shared.back().kv_head = head;
        }
        int64_t row = plan_.num_split_rows;
        for (size_t i = begin; i < end; ++i) {
            plan_.members.push_back(found.tiles[i]);
            plan_.splits[static_cast<size_t>(split_of(found.tiles[i]))] = {row, rows, found.end};
            row += plan_.rows_of(found.tiles[i]);
        }
        plan_.num_split_rows += int64_t{rows} * metadata_.shape.num_kv_heads;
    }

    const AttentionMetadata& metadata_;
    AttentionPlan& plan_;
};

}  // namespace

AttentionMetadata::AttentionMetadata(const HeadShape& shape_, int64_t num_blocks_, int64_t n, const int64_t* query_lens,
                                     const int64_t* context_lens, const int64_t* draft_lens,
                                     const int64_t* block_tables, int64_t width_, ContextParts parts_)
    : shape(shape_), num_blocks(num_blocks_), width(width_), blocks(block_tables, block_tables + n * width_), parts(parts_) {
    if (shape.num_heads % shape.num_kv_heads != 0) {
        throw std::invalid_argument(std::to_string(shape.num_heads) + " query heads do not share " +
                                    std::to_string(shape.num_kv_heads) + " KV heads.");
    }
    for (int64_t i = 0; i < n * width; ++i) {
        if (block_tables[i] < 0) spread = true;
        if (block_tables[i] >= -kMaxRanks && block_tables[i] < num_blocks) continue;
        throw std::out_of_range("Block " + std::to_string(block_tables[i]) + " is not one of the cache's " +
                                std::to_string(num_blocks) + ".");
    }
    for (int64_t i = 0; i < n; ++i) {
        if (query_lens[i] < 0 || query_lens[i] > context_lens[i] || context_lens[i] > width * shape.block_size) {
            throw std::invalid_argument(std::to_string(query_lens[i]) + " tokens of a context of " +
                                        std::to_string(context_lens[i]) + " do not fit a table of " + std::to_string(width) +
                                        " blocks of " + std::to_string(shape.block_size) + ".");
        }
        const int64_t kept_len = context_lens[i] - (draft_lens == nullptr ? 0 : draft_lens[i]);
        sequences.push_back({num_tokens, query_lens[i], context_lens[i], kept_len});
        for (int64_t position = context_lens[i] - query_lens[i]; position < context_lens[i]; ++position) {
            const int64_t block = blocks_of(i)[position / shape.block_size];
            token_rows.push_back(block < 0 ? -1 : block * shape.block_size + position % shape.block_size);
            token_sequences.push_back(static_cast<int32_t>(i));
        }
        num_tokens += query_lens[i];
        longest_context_ = std::max(longest_context_, context_lens[i]);
    }
}

void AttentionMetadata::set_cold(std::vector<ColdRun> runs, std::unique_ptr<SegmentSource> source_) {
    cold = std::move(runs), source = std::move(source_);
    for (const ColdRun& run : cold) {
        Sequence& own = sequences.at(static_cast<size_t>(run.sequence));
        if (own.cold_len == 0) own.first_carried = num_carried, num_carried += own.query_len;
        own.cold_len += run.count * parts.segment;
        if (own.cold_len > own.context_len - own.query_len) {
            throw std::invalid_argument(std::to_string(own.query_len) + " tokens of a context of " +
                                        std::to_string(own.context_len) + " are in " +
                                        std::to_string(own.cold_len / parts.segment) + " cold segments of " +
                                        std::to_string(parts.segment) + ".");
        }
        cold_plans_.emplace(run, AttentionPlan(*this, run));
    }
}

PlanSizes PlanSizes::or_more(const PlanSizes& other) const {
    PlanSizes most;
    most.max_rows = std::max(max_rows, other.max_rows);
    most.max_heads = std::max(max_heads, other.max_heads);
    most.max_head_rows = std::max(max_head_rows, other.max_head_rows);
    most.max_queries = std::max(max_queries, other.max_queries);
    most.num_split_rows = std::max(num_split_rows, other.num_split_rows);
    return most;
}

PlanSizes AttentionMetadata::sizes(const Reach& reach) const {
    PlanSizes most = plan(reach);
    for (const auto& [run, own] : cold_plans_) most = most.or_more(own);
    return most;
}

const AttentionPlan& AttentionMetadata::plan(const Reach& whole) const {
    const Reach reach = whole.up_to(longest_context_);
    const auto known = plans_.find(reach);
    return known != plans_.end() ? known->second : plans_.emplace(reach, AttentionPlan(*this, reach)).first->second;
}

const std::vector<AttentionPlan>& AttentionMetadata::rounds(const Reach& whole, int rank, int size) const {
    const Reach reach = whole.up_to(longest_context_);
    const auto known = rounds_.find(reach);
    if (known != rounds_.end()) return known->second;
    std::vector<AttentionPlan> rounds;
    for (int64_t round = 0; round < num_rounds(size); ++round) {
        std::vector<int64_t> starts;
        for (size_t i = 0; i < sequences.size(); ++i) {
            const int turn = (rank + size - first_rank(static_cast<int64_t>(i), rank)) % size;
            starts.push_back((round * size + turn) * parts.segment);
        }
        rounds.emplace_back(*this, reach, starts);
    }
    return rounds_.emplace(reach, std::move(rounds)).first->second;
}

int64_t AttentionMetadata::num_tokens_read(const Reach& reach) const {
    int64_t read = 0;
    for (const auto* of_phase : {&plan(reach).shared, &plan(reach).items}) {
        for (const auto& item : *of_phase) read += item.work();
    }
    return read / shape.num_kv_heads;
}

AttentionPlan::AttentionPlan(const AttentionMetadata& metadata, const Reach& reach)
    : group(metadata.shape.num_heads / metadata.shape.num_kv_heads), parts(metadata.parts) {
    for (size_t i = 0; i < metadata.sequences.size(); ++i) {
        const auto& sequence = metadata.sequences[i];
        add_tiles(static_cast<int64_t>(i), metadata, [&](Tile& tile) {
            tile.begin = std::max(round_down(reach.first(tile.first_position), kKeyTile), sequence.cold_len);
            tile.end = reach.last(tile.first_position + tile.num_tokens - 1, sequence.context_len) + 1;
        });
    }
    SharedSplits(metadata, *this).find();
    add_items(metadata);
}

AttentionPlan::AttentionPlan(const AttentionMetadata& metadata, const ColdRun& run)
    : group(metadata.shape.num_heads / metadata.shape.num_kv_heads), parts(metadata.parts) {
    add_tiles(run.sequence, metadata, [&](Tile& tile) { tile.begin = 0, tile.end = run.count * parts.segment; });
    add_items(metadata);
}

AttentionPlan::AttentionPlan(const AttentionMetadata& metadata, const Reach& reach, const std::vector<int64_t>& starts)
    : group(metadata.shape.num_heads / metadata.shape.num_kv_heads), parts(metadata.parts) {
    for (size_t i = 0; i < metadata.sequences.size(); ++i) {
        add_tiles(static_cast<int64_t>(i), metadata, [&](Tile& tile) {
            const int64_t last = tile.first_position + tile.num_tokens - 1;
            const int64_t first = round_down(reach.first(tile.first_position), kKeyTile);
            const int64_t end = reach.last(last, metadata.sequences[i].context_len) + 1;
            tile.begin = std::max(first, starts[i]);
            tile.end = std::min(end, starts[i] + parts.segment);
            if (tile.begin >= tile.end) tile.begin = tile.end = 0;
        });
    }
    SharedSplits(metadata, *this).find();
    add_items(metadata);
}

void AttentionPlan::add_tiles(int64_t number, const AttentionMetadata& metadata, const std::function<void(Tile&)>& place) {
    const auto& sequence = metadata.sequences[static_cast<size_t>(number)];
    const int64_t tokens_per_tile = std::max(1, kQueryRows / group);
    for (int64_t done = 0; done < sequence.query_len; done += tokens_per_tile) {
        const int64_t count = std::min(tokens_per_tile, sequence.query_len - done);
        const int64_t position = sequence.context_len - sequence.query_len + done;
        members.push_back(static_cast<int64_t>(tiles.size()));
        tiles.push_back({sequence.first_token + done, count, position, number, 0, 0, static_cast<int64_t>(splits.size())});
        place(tiles.back());
        splits.resize(splits.size() + static_cast<size_t>(num_splits(tiles.back())));
    }
}

void AttentionPlan::add_items(const AttentionMetadata& metadata) {
    const int kv_heads = metadata.shape.num_kv_heads;
    int64_t total = 0;
    for (const Tile& tile : tiles) total += (tile.end - tile.begin) * kv_heads;
    // Cached tokens from which on an item is shared out, lest one thread is at it when all others are done.
    const int64_t longest = std::max<int64_t>(parts.split, total / (kItemsPerThread * omp_get_max_threads()));
    // Items for all heads, several in one while it stays short: what they read lies side by side.
    const auto put = [&](std::vector<Item>& to, Item item) {
        const int64_t rows = rows_of(members[static_cast<size_t>(item.first_member)]);
        const int64_t most = std::max<int64_t>(1, std::min(longest / (item.end - item.begin), kQueryRows / rows));
        const int64_t count = (kv_heads + most - 1) / most;
        for (int64_t i = 0; i < count; ++i) {
            item.kv_head = static_cast<int>(kv_heads * i / count);
            item.heads = static_cast<int>(kv_heads * (i + 1) / count) - item.kv_head;
            to.push_back(item);
        }
    };
    for (size_t i = 0; i < tiles.size(); ++i) {
        const auto member = static_cast<int64_t>(i);
        const Tile& tile = tiles[i];
        if (tile.begin == tile.end) continue;
        const auto first = splits.begin() + tile.first_split;
        const bool meets = std::any_of(first, first + num_splits(tile), [](const Split& split) { return split.row >= 0; });
        if (!meets && tile.end - tile.begin <= longest) {
            put(items, {member, 1, 0, 0, tile.begin, tile.end, -1, false});
            continue;
        }
        put(merged, {member, 1, 0, 0, tile.begin, tile.end, -1, false});
        int64_t begin = tile.begin;
        for (int64_t index = tile.first_split; begin < tile.end; ++index) {
            const int64_t end = std::min(round_down(begin, parts.split) + parts.split, tile.end);
            Split& split = splits[static_cast<size_t>(index)];
            const bool resumes = split.row >= 0;
            if (!resumes) {
                split = {num_split_rows, rows_of(member), begin};
                num_split_rows += int64_t{rows_of(member)} * kv_heads;
            }
            if (split.resume < end) put(items, {member, 1, 0, 0, split.resume, end, index, resumes});
            begin = end;
        }
    }
    // The longest first, so that threads finish together.
    for (auto* of_phase : {&shared, &items}) {
        std::stable_sort(of_phase->begin(), of_phase->end(),
                         [](const Item& a, const Item& b) { return a.work() > b.work(); });
    }
    for (const auto* of_phase : {&shared, &items, &merged}) {
        for (const Item& item : *of_phase) {
            int rows = 0;
            for (int64_t i = 0; i < item.num_members; ++i) {
                rows += rows_of(members[static_cast<size_t>(item.first_member + i)]);
            }
            max_rows = std::max(max_rows, rows);
            max_heads = std::max(max_heads, item.heads);
            max_head_rows = std::max(max_head_rows, rows * item.heads);
            max_queries = std::max(max_queries, item.heads * packed_queries(rows, 1));
        }
    }
}

}  // namespace pagoda
