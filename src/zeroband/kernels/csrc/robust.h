// One result of several members' contributions that a minority of liars moves only so far.
//
// Nothing that a member says of itself is believed: norms are measured on the values that came. They are measured over
// pieces of PIECE values, so that nothing waits for a whole shard, and no member hides a large change of few values behind
// many small ones. What the order of the members is does not show in the bits: contributions to a piece are added in the
// order of their bytes in it, so a piece can be combined again by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec.h"

namespace zeroband {

constexpr size_t PIECE = 4096;

enum RobustRule : int {
    PLAIN = 0,     // the weighted mean
    CLIP = 1,      // the mean of contributions that are at most as long as the median one
    TRIMMED = 2,   // coordinate by coordinate, the mean of those in the middle; all count the same
    CENTERED = 3,  // CenteredClip: from the median on, contributions pull at most as far as the median distance
    RULE_COUNT = 4
};

struct Robust {
    RobustRule rule = PLAIN;
    double trim = 0;          // TRIMMED: part of the contributions that is left out at each end
    uint32_t iterations = 0;  // CENTERED
};

struct Contribution {
    uint32_t member;
    float share;          // in the mean, above 0
    const uint8_t* data;  // of n values, as the codec encodes them
};

// What was seen of each member's contributions, added up over pieces.
struct Measured {
    double* dots;     // with the result; minus infinity where a value was not finite
    double* squares;  // of each contribution
    double* result;   // squares of the result
};

// Writes the combination of n values times the sum of the shares. A piece of a contribution in which a value is not
// finite does not count; where the combination is not finite it is zeros. `variant`: of the instruction sets; -1: best.
void combine(const Robust& robust, CodecId codec, int variant, const std::vector<Contribution>& contributions, size_t n,
             float* out, const Measured& measured);

}  // namespace zeroband
