// SPDX-License-Identifier: Apache-2.0
// A graph of pagoda/backend/graph.py, and what becomes of its nodes in a program.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "experts.h"
#include "low_rank.h"
#include "program.h"
#include "states.h"

namespace pagoda {

// The ranks that a node adds up or gathers over.
class Group {
   public:
    virtual ~Group() = default;

    // Makes rows [n, d] the sum of those of all ranks. Called by all threads of a team.
    virtual void all_reduce(const KernelTable& table, float* rows, int64_t n, int64_t d) = 0;
    // The bytes of every rank, one behind the other. Called by the first thread alone.
    virtual void all_gather(const void* x, int64_t bytes, void* out) = 0;
    // The bytes for this rank, of every rank in order: `bytes` [size, size] go from each to each. As `all_gather`.
    virtual void all_to_all(const void* x, const std::vector<int64_t>& bytes, void* out) = 0;

    int size = 1, rank = 0;
};

// Linear layers of the same inputs, as one: their outputs follow one another.
struct LinearLayer {
    struct Part {
        PackedLinear weight;
        const float* bias;  // of whole panels, or null
        int64_t bias_bytes;
    };

    std::vector<Part> parts;

    int64_t inputs() const { return parts.at(0).weight.inputs(); }
    int64_t outputs() const;
};

using Weight = std::variant<const float*, const LinearLayer*, const Experts*, const LowRankMaps*, const Cache*, const StateCache*,
                            Group*>;

struct Node {
    std::string op;
    std::vector<int> inputs, outputs;  // values
    std::vector<int> weights;          // indices
    std::vector<double> numbers;       // attributes, in the order of the operation's
};

struct Graph {
    std::vector<Program::ValueShape> values;
    std::vector<int> inputs, results;  // values
    int rows, adapters;                // inputs, or -1
    std::vector<Node> nodes;
    std::vector<Weight> weights;  // what they point to has to stay

    const Node& node(int index) const { return nodes[static_cast<size_t>(index)]; }
    int64_t width(int value) const { return values[static_cast<size_t>(value)].width; }
    // The weight of a node at a place among those that it takes.
    template <class T>
    T weight(const Node& node, size_t place) const {
        return std::get<T>(weights.at(static_cast<size_t>(node.weights.at(place))));
    }
    // The same, null if the node has none there.
    const float* vector(const Node& node, size_t place) const {
        return node.weights.size() > place ? weight<const float*>(node, place) : nullptr;
    }
};

// Throws std::invalid_argument if the graph has an operation that there is no kernel for.
std::unique_ptr<Program> lower(const KernelTable& table, const Graph& graph);

}  // namespace pagoda
