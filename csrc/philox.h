// SPDX-License-Identifier: Apache-2.0
// Random numbers as a pure function of (seed, position): Philox4x32-10 (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3").
#pragma once

#include <cstdint>

namespace pagoda {

// A random number below 2^53.
inline uint64_t uniform(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
        const uint32_t c0 = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0];
        const uint32_t c2 = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1];
        c[0] = c0, c[1] = static_cast<uint32_t>(p1), c[2] = c2, c[3] = static_cast<uint32_t>(p0);
        k[0] += 0x9E3779B9;
        k[1] += 0xBB67AE85;
    }
    return ((uint64_t{c[1]} << 32) | c[0]) >> 11;
}

}  // namespace pagoda
