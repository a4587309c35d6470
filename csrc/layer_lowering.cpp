// SPDX-License-Identifier: Apache-2.0
#include "layer_lowering.h"

#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "heads.h"
#include "indexed_attention.h"

namespace pagoda {

namespace {

using Value = Program::Value;

HeadShape shape_of(const Cache& cache, int64_t heads) {
    return {static_cast<int>(heads), static_cast<int>(cache.num_kv_heads), static_cast<int>(cache.head_dim),
            static_cast<int>(cache.block_size)};
}
// Layers with a state have no heads; their metadata says one of one element (pagoda/backend/cpu/backend.py).
HeadShape shape_of(const StateCache& cache) { return {1, 1, 1, static_cast<int>(cache.block_size)}; }

// ---- attention

// Heads of queries in rows of so many elements. Throws if rows are not of whole heads, as many for each of the cache's.
int64_t num_heads(const Node& own, const Cache& cache, int64_t elements) {
    const int64_t d = cache.head_dim, heads = elements / d;
    if (static_cast<int64_t>(own.numbers.at(0)) != d) {
        throw std::invalid_argument(own.op + " of heads of " + std::to_string(static_cast<int64_t>(own.numbers.at(0))) +
                                    " does not fit a cache of heads of " + std::to_string(d) + ".");
    }
    if (heads == 0 || elements % d != 0 || heads % cache.num_kv_heads != 0) {
        throw std::invalid_argument(own.op + " of " + std::to_string(elements) + " elements does not fit a cache of " +
                                    std::to_string(cache.num_kv_heads) + " KV heads of " + std::to_string(d) + ".");
    }
    return heads;
}

// Metadata of a step has to be of the heads and blocks that an operation goes through.
void check_metadata(const AttentionMetadata& metadata, const HeadShape& wanted, int64_t num_blocks) {
    const HeadShape& own = metadata.shape;
    const auto words = [](const HeadShape& shape, int64_t blocks) {
        return std::to_string(shape.num_heads) + " heads of " + std::to_string(shape.head_dim) + ", " +
               std::to_string(shape.num_kv_heads) + " KV heads and " + std::to_string(blocks) + " blocks of " +
               std::to_string(shape.block_size);
    };
    if (own == wanted && metadata.num_blocks <= num_blocks) return;
    throw std::invalid_argument("Metadata of " + words(own, metadata.num_blocks) + " does not fit a graph of " +
                                words(wanted, num_blocks) + ".");
}

void rotate_and_cache(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Value qkv = own.inputs[0], metadata = own.inputs.at(1), out = own.outputs[0];
    const bool rotates = own.inputs.size() > 2;
    const Value cosines = rotates ? own.inputs.at(2) : qkv, sines = rotates ? own.inputs.at(3) : qkv;
    const int64_t r = rotates ? 2 * graph.width(cosines) : 0;
    const auto head_dim = static_cast<int64_t>(own.numbers.at(0));
    const Cache* cache = graph.weight<const Cache*>(own, 0);
    const HeadShape shape = shape_of(*cache, num_heads(own, *cache, graph.width(out)));
    if (graph.width(qkv) != graph.width(out) + 2 * cache->num_kv_heads * head_dim) {
        throw std::invalid_argument("Rows of " + std::to_string(graph.width(qkv)) + " are not " + std::to_string(shape.num_heads) +
                                    " queries and keys and values of a cache of " + std::to_string(cache->num_kv_heads) +
                                    " KV heads of " + std::to_string(head_dim) + ".");
    }
    const HeadNorms norms{graph.vector(own, 1), graph.vector(own, 2), static_cast<float>(own.numbers.at(1)),
                          own.numbers.at(2) != 0};
    // Of queries and keys.
    const int64_t normed = norms.all_heads ? graph.width(out) + (graph.width(qkv) - graph.width(out)) / 2 : 2 * head_dim;
    program.record({.nodes = {index}, .uses = {qkv, cosines, sines, out}, .work = graph.width(qkv),
                    .run = [=, &p = program](const Step&, void*) {
                         const Rotary rotary{p.at(cosines), p.at(sines), r};
                         pagoda::rotate_and_cache(p.table(), *p.at<const AttentionMetadata>(metadata), *cache, p.at(qkv),
                                                  norms, rotary, p.at(out));
                    },
                    .check = [=, &p = program](const Step&) {
                         check_metadata(*p.at<const AttentionMetadata>(metadata), shape, cache->num_blocks);
                    },
                    .weight_bytes = norms.queries == nullptr ? 0 : normed * size_of(Dtype::f32)});
}

// Attention with scores by distance takes no sequence that is longer than it knows distances, and whole ones where tokens
// see those behind them.
void check_distances(const AttentionMetadata& metadata, const AttentionOptions& options) {
    const int64_t reach = options.relative.reach;
    if (reach < 0) return;
    for (const auto& sequence : metadata.sequences) {
        const bool is_whole = options.reach.causal || sequence.query_len == sequence.context_len;
        if (is_whole && sequence.context_len <= reach + 1) continue;
        throw std::invalid_argument(std::to_string(sequence.query_len) + " tokens of a context of " +
                                    std::to_string(sequence.context_len) + " are not of a whole one of at most " +
                                    std::to_string(reach + 1) + ".");
    }
}

// Records attention of `queries` over the whole context, or, with `ranks`, over one that is spread over these. `held`
// is kept for as long as the program lives.
void record_attention(Program& program, const Graph& graph, int index, const Cache* cache, const AttentionOptions& options,
                      Group* ranks, const std::shared_ptr<void>& held = nullptr) {
    const Node& own = graph.node(index);
    const bool latents = cache->holds_latents();
    const Value queries = own.inputs[0], rest = own.inputs.at(latents ? 1 : 0), out = own.outputs[0];
    const Value metadata = own.inputs.at(latents ? 2 : 1);
    const HeadShape shape = shape_of(*cache, latents ? graph.width(queries) / cache->value_dim
                                                     : num_heads(own, *cache, graph.width(queries)));
    const ContextRanks context{ranks == nullptr ? 0 : ranks->rank, ranks == nullptr ? 1 : ranks->size,
                               [=](const void* x, int64_t bytes, void* to) { ranks->all_gather(x, bytes, to); }};
    const bool by_buckets = options.relative.buckets != nullptr;
    const Value of_queries = by_buckets ? own.inputs.at(2) : queries, of_keys = by_buckets ? own.inputs.at(3) : queries;
    program.record({.nodes = {index}, .uses = {queries, rest, of_queries, of_keys, out},
                    .work = graph.width(queries) * kKeyTile,
                    .run = [=, &p = program](const Step&, void* scratch) {
                        const Queries both{p.at(queries), latents ? p.at(rest) : nullptr};
                        const auto& step = *p.at<const AttentionMetadata>(metadata);
                        AttentionOptions own_options = options;
                        if (by_buckets) {
                            own_options.relative.of_queries = p.at(of_queries), own_options.relative.of_keys = p.at(of_keys);
                        }
                        if (ranks != nullptr) {
                            pagoda::context_attention(p.table(), step, *cache, both, own_options, context, p.at(out), scratch);
                        } else {
                            pagoda::attention(p.table(), step, *cache, both, own_options, p.at(out), scratch);
                        }
                        static_cast<void>(held);
                    },
                    .scratch = [=, &p = program](const Step&) {
                        const auto& step = *p.at<const AttentionMetadata>(metadata);
                        return ranks != nullptr ? context_attention_scratch(step, *cache, options.reach, context)
                                                : attention_scratch(step, *cache, options.reach);
                    },
                    .check = [=, &p = program](const Step&) {
                        const auto& step = *p.at<const AttentionMetadata>(metadata);
                        check_metadata(step, shape, cache->num_blocks);
                        check_distances(step, options);
                        if (step.spread && ranks == nullptr) {
                            throw std::out_of_range("Blocks of other ranks do not fit a graph of one.");
                        }
                    }});
}

// A window or a chunk.
int64_t limit_of(const Node& node, size_t place) {
    const auto number = static_cast<int64_t>(node.numbers.at(place));
    return number > 0 ? number : kUnlimited;
}

void attention(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const AttentionOptions options{static_cast<float>(own.numbers.at(1)),
                                   {limit_of(own, 2), limit_of(own, 4), own.numbers.at(5) != 0},
                                   static_cast<float>(own.numbers.at(3)), graph.vector(own, 1)};
    record_attention(program, graph, index, graph.weight<const Cache*>(own, 0), options, nullptr);
}

void context_attention(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const AttentionOptions options{static_cast<float>(own.numbers.at(1)), {limit_of(own, 2), limit_of(own, 4), true},
                                   static_cast<float>(own.numbers.at(3)), graph.vector(own, 2)};
    record_attention(program, graph, index, graph.weight<const Cache*>(own, 0), options, graph.weight<Group*>(own, 1));
}

void alibi_attention(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Cache* cache = graph.weight<const Cache*>(own, 0);
    const int64_t heads = num_heads(own, *cache, graph.width(own.inputs[0]));
    const float* given = graph.vector(own, 1);
    const auto slopes = std::make_shared<std::vector<float>>(given, given + heads);
    for (float& slope : *slopes) slope *= kLog2E;
    AttentionOptions options{static_cast<float>(own.numbers.at(1)), {}};
    options.relative.slopes = slopes->data();
    Group* ranks = own.weights.size() > 2 ? graph.weight<Group*>(own, 2) : nullptr;
    record_attention(program, graph, index, cache, options, ranks, slopes);
}

void relative_attention(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Cache* cache = graph.weight<const Cache*>(own, 0);
    const auto reach = static_cast<int64_t>(own.numbers.at(2));
    const int64_t heads = num_heads(own, *cache, graph.width(own.inputs[0])), distances = 2 * reach + 1;
    // Whole tiles of keys are read, those too that are not seen.
    const int64_t stride = distances + kKeyTile;
    const auto padded = std::make_shared<std::vector<float>>(static_cast<size_t>(heads * stride));
    const float* given = graph.vector(own, 1);
    for (int64_t head = 0; head < heads; ++head) {
        for (int64_t i = 0; i < distances; ++i) {
            (*padded)[static_cast<size_t>(head * stride + i)] = given[head * distances + i] * kLog2E;
        }
    }
    AttentionOptions options{static_cast<float>(own.numbers.at(1)), {kUnlimited, kUnlimited, own.numbers.at(3) != 0}};
    options.relative.of_distances = padded->data();
    options.relative.head_stride = stride;
    options.relative.reach = reach;
    record_attention(program, graph, index, cache, options, nullptr, padded);
}

void disentangled_attention(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Cache* cache = graph.weight<const Cache*>(own, 0);
    const auto buckets = std::make_shared<std::vector<int32_t>>(own.numbers.begin() + 2, own.numbers.end());
    const auto scale = static_cast<float>(own.numbers.at(1));
    AttentionOptions options{scale, {kUnlimited, kUnlimited, false}};
    options.relative.buckets = buckets->data();
    options.relative.reach = static_cast<int64_t>(buckets->size()) / 2;
    options.relative.num_heads = num_heads(own, *cache, graph.width(own.inputs[0]));
    options.relative.num_buckets = graph.width(own.inputs.at(2)) / options.relative.num_heads;
    options.relative.scale = scale * kLog2E;
    record_attention(program, graph, index, cache, options, nullptr, buckets);
}

// ---- latents

void head_linear(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Value x = own.inputs[0], out = own.outputs[0];
    const auto* heads = graph.weight<const LinearLayer*>(own, 0);
    int64_t bytes = 0, weights = 0;
    for (const LinearLayer::Part& head : heads->parts) {
        bytes += head.weight.bytes();
        weights += head.weight.inputs() * head.weight.outputs();
    }
    program.record({.nodes = {index}, .uses = {x, out}, .work = weights,
                    .run = [=, &p = program](const Step& step, void* scratch) {
                        pagoda::head_linear(p.table(), *heads, p.at(x), p.num_rows(x, step), p.at(out), scratch);
                    },
                    .scratch = [=, &p = program](const Step& step) {
                        return head_linear_scratch(p.table(), *heads, p.num_rows(x, step));
                    },
                    .weight_bytes = bytes, .flops = 2 * weights});
}

void rotate_and_cache_latents(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Value queries = own.inputs[0], latents = own.inputs.at(1), metadata = own.inputs.at(2), out = own.outputs[0];
    const bool rotates = own.inputs.size() > 3;
    const Value cosines = rotates ? own.inputs.at(3) : queries, sines = rotates ? own.inputs.at(4) : queries;
    const int64_t r = rotates ? 2 * graph.width(cosines) : 0;
    const auto* cache = graph.weight<const Cache*>(own, 0);
    const float* norm = graph.vector(own, 1);
    const auto eps = static_cast<float>(own.numbers.at(0));
    const HeadShape shape = shape_of(*cache, graph.width(queries) / (cache->head_dim - cache->value_dim - cache->index_dim));
    program.record({.nodes = {index}, .uses = {queries, latents, cosines, sines, out},
                    .work = graph.width(queries) + graph.width(latents),
                    .run = [=, &p = program](const Step&, void*) {
                        const Rotary rotary{p.at(cosines), p.at(sines), r};
                        pagoda::rotate_and_cache_latents(p.table(), *p.at<const AttentionMetadata>(metadata), *cache,
                                                         p.at(queries), p.at(latents), norm, eps, rotary, p.at(out));
                    },
                    .check = [=, &p = program](const Step&) {
                        check_metadata(*p.at<const AttentionMetadata>(metadata), shape, cache->num_blocks);
                    },
                    .weight_bytes = cache->value_dim * size_of(Dtype::f32)});
}

void latent_attention(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    Group* ranks = own.weights.size() > 1 ? graph.weight<Group*>(own, 1) : nullptr;
    record_attention(program, graph, index, graph.weight<const Cache*>(own, 0), {static_cast<float>(own.numbers.at(0)), {}}, ranks);
}

void indexed_latent_attention(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Value queries = own.inputs[0], rest = own.inputs.at(1), of_index = own.inputs.at(2), weights = own.inputs.at(3);
    const Value metadata = own.inputs.at(4), out = own.outputs[0];
    const Cache* cache = graph.weight<const Cache*>(own, 0);
    const HeadShape shape = shape_of(*cache, graph.width(queries) / cache->value_dim);
    const auto layer = std::make_shared<IndexedAttention>(*cache, shape.num_heads, graph.width(weights),
                                                          static_cast<int64_t>(own.numbers.at(1)),
                                                          static_cast<float>(own.numbers.at(0)));
    program.record({.nodes = {index}, .uses = {queries, rest, of_index, weights, out}, .work = graph.width(queries) * kKeyTile,
                    .run = [=, &p = program](const Step&, void* scratch) {
                        const IndexedQueries all{{p.at(queries), p.at(rest)}, p.at(of_index), p.at(weights)};
                        layer->run(p.table(), *p.at<const AttentionMetadata>(metadata), all, p.at(out), scratch);
                    },
                    .scratch = [=, &p = program](const Step&) {
                        return layer->scratch(*p.at<const AttentionMetadata>(metadata));
                    },
                    .check = [=, &p = program](const Step&) {
                        const auto& step = *p.at<const AttentionMetadata>(metadata);
                        check_metadata(step, shape, cache->num_blocks);
                        if (step.spread || !step.cold.empty()) {
                            throw std::invalid_argument("an indexer chooses among tokens in the cache of this rank only");
                        }
                    }});
}

// ---- layers with a state

void short_conv(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Value x = own.inputs[0], metadata = own.inputs.at(1), out = own.outputs[0];
    const StateCache& cache = *graph.weight<const StateCache*>(own, 0);
    const ShortConv conv{cache, graph.vector(own, 1), graph.vector(own, 2), own.numbers.at(0) != 0, own.numbers.at(1) != 0};
    const int64_t taps = (cache.floats + 1) * cache.units;
    if (cache.floats >= kMaxConvWidth) throw std::invalid_argument("a convolution is too wide");
    program.record({.nodes = {index}, .uses = {x, out}, .work = taps,
                    .run = [=, &p = program](const Step&, void*) {
                         pagoda::short_conv(p.table(), *p.at<const AttentionMetadata>(metadata), conv, p.at(x), p.at(out));
                    },
                    .check = [=, &p = program](const Step&) {
                         check_metadata(*p.at<const AttentionMetadata>(metadata), shape_of(conv.cache), conv.cache.num_blocks);
                    },
                    .weight_bytes = (taps + (conv.bias == nullptr ? 0 : cache.units)) * size_of(Dtype::f32)});
}

void gated_delta(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Value qkv = own.inputs[0], gates = own.inputs.at(1), metadata = own.inputs.at(2), out = own.outputs[0];
    const StateCache& cache = *graph.weight<const StateCache*>(own, 0);
    const auto key_heads = static_cast<int64_t>(own.numbers.at(0)), key_dim = static_cast<int64_t>(own.numbers.at(1));
    const GatedDelta layer{cache, graph.vector(own, 1), graph.vector(own, 2), key_heads, key_dim, graph.width(out) / cache.units,
                           own.numbers.at(2) != 0};
    if (key_dim > kMaxDeltaKey || key_dim % kDeltaKeyMultiple != 0) {
        throw std::invalid_argument("keys of a delta rule have a multiple of " + std::to_string(kDeltaKeyMultiple) +
                                    " elements, at most " + std::to_string(kMaxDeltaKey));
    }
    program.record({.nodes = {index}, .uses = {qkv, gates, out}, .work = 4 * cache.units * cache.floats,
                    .run = [=, &p = program](const Step&, void*) {
                         pagoda::gated_delta(p.table(), *p.at<const AttentionMetadata>(metadata), layer, p.at(qkv),
                                             p.at(gates), p.at(out));
                    },
                    .check = [=, &p = program](const Step&) {
                         check_metadata(*p.at<const AttentionMetadata>(metadata), shape_of(layer.cache), layer.cache.num_blocks);
                    },
                    .weight_bytes = (1 + (layer.by_channel ? key_dim : 1)) * cache.units * size_of(Dtype::f32)});
}

void selective_scan(Program& program, const Graph& graph, int index) {
    const Node& own = graph.node(index);
    const Value x = own.inputs[0], b = own.inputs.at(1), c = own.inputs.at(2), dt = own.inputs.at(3), out = own.outputs[0];
    const Value metadata = own.inputs.at(4);
    const StateCache& cache = *graph.weight<const StateCache*>(own, 0);
    const auto number = [&](size_t place) { return static_cast<int64_t>(own.numbers.at(place)); };
    const SelectiveScan layer{cache, graph.vector(own, 1), graph.vector(own, 2), graph.vector(own, 3), own.numbers.at(4) != 0,
                              number(0), graph.width(out) / cache.units, number(1), number(2), number(3),
                              static_cast<float>(own.numbers.at(5)), static_cast<float>(own.numbers.at(6))};
    if (layer.state_dim > kMaxScanState) {
        throw std::invalid_argument("states of a scan have at most " + std::to_string(kMaxScanState) + " elements");
    }
    const int64_t strides[3] = {graph.width(x), graph.width(b), graph.width(c)};
    program.record({.nodes = {index}, .uses = {x, b, c, dt, out}, .work = 4 * cache.units * cache.floats,
                    .run = [=, &p = program](const Step&, void*) {
                         const ScanRows rows{p.at(x), p.at(b), p.at(c), p.at(dt), strides[0], strides[1], strides[2]};
                         pagoda::selective_scan(p.table(), *p.at<const AttentionMetadata>(metadata), layer, rows, p.at(out));
                    },
                    .check = [=, &p = program](const Step&) {
                         check_metadata(*p.at<const AttentionMetadata>(metadata), shape_of(layer.cache), layer.cache.num_blocks);
                    },
                    .weight_bytes = (layer.by_element ? layer.state_dim + 2 : 3) * cache.units * size_of(Dtype::f32)});
}

const std::map<std::string, void (*)(Program&, const Graph&, int)> kLayerLowerings = {
    {"rotate_and_cache", rotate_and_cache},
    {"attention", attention},
    {"context_attention", context_attention},
    {"alibi_attention", alibi_attention},
    {"relative_attention", relative_attention},
    {"disentangled_attention", disentangled_attention},
    {"head_linear", head_linear},
    {"rotate_and_cache_latents", rotate_and_cache_latents},
    {"latent_attention", latent_attention},
    {"indexed_latent_attention", indexed_latent_attention},
    {"short_conv", short_conv},
    {"gated_delta", gated_delta},
    {"selective_scan", selective_scan},
};

}  // namespace

bool lower_layer(Program& program, const Graph& graph, int index) {
    const auto known = kLayerLowerings.find(graph.node(index).op);
    if (known == kLayerLowerings.end()) return false;
    known->second(program, graph, index);
    return true;
}

}  // namespace pagoda
