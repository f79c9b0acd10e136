// Robust combinations of members' contributions: a minority of liars can move the result only by a bounded amount.
//
// Norms are measured on the received values, not reported by members. They are measured over pieces of PIECE values, so
// that no work waits for a whole shard, and no member can hide a large change of few values behind many small ones. The
// bits do not depend on the order of members: contributions to a piece are added in the order of their bytes, so an
// audit can recompute any single piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec.h"

namespace zeroband {

constexpr size_t PIECE = 4096;

enum RobustRule : int {
    PLAIN = 0,     // the weighted mean
    CLIP = 1,      // the mean of contributions clipped to the median norm
    TRIMMED = 2,   // coordinate-wise trimmed mean; all members count equally
    CENTERED = 3,  // CenteredClip: start at the median, pulls clipped to the median distance
    RULE_COUNT = 4
};

struct Robust {
    RobustRule rule = PLAIN;
    double trim = 0;          // TRIMMED: fraction of the contributions dropped at each end
    uint32_t iterations = 0;  // CENTERED
};

struct Contribution {
    uint32_t member;
    float share;          // coefficient in the mean, above 0
    const uint8_t* data;  // n encoded values
};

// Measurements of each member's contributions, summed over pieces.
struct Measured {
    double* dots;     // dot products with the result; minus infinity if a value was not finite
    double* squares;  // of each contribution
    double* result;   // squares of the result
};

// Writes the combination of n values, times the sum of the shares. Pieces with a non-finite value are dropped; a
// non-finite combination becomes zeros. `variant`: instruction set; -1: the best.
void combine(const Robust& robust, CodecId codec, int variant, const std::vector<Contribution>& contributions, size_t n,
             float* out, const Measured& measured);

}  // namespace zeroband
