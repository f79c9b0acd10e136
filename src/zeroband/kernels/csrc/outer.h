// Passes of an outer step over the state in memory, multi-threaded: each reads and writes every value once. Every
// operation rounds once, so the bits depend neither on the instruction set nor on how parts and threads divide the
// state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec.h"

namespace zeroband {

struct OuterStep {
    float lr;
    float momentum;
    bool is_nesterov;
};

// `variant`: instruction set; -1: the best. `threads`: upper bound.

// out = outer - inner. Returns the largest |out|: infinite or NaN if a value is; 0 if n is 0.
float difference(int variant, int threads, const float* outer, const float* inner, uint64_t n, float* out);

// v <- momentum v + delta; params <- params - lr (momentum v + delta) with Nesterov, else params - lr v.
void take_step(int variant, int threads, float* params, float* v, const float* delta, uint64_t n, const OuterStep& step);

// Copies with non-temporal stores, for memory that is not read soon.
void copy(int variant, int threads, const float* from, uint64_t n, float* to);

}  // namespace zeroband
