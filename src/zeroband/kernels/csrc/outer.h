// The passes of an outer step over the state in memory: each reads and writes a value once, on several threads. Every
// operation rounds once, so the bits depend neither on the instruction set nor on where a part or a thread begins.
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

// `variant`: of the instruction sets; -1: the best. `threads`: at most.

// out = outer - inner. Gives the largest |out|: infinite or not a number where one is, 0 where there is none.
float difference(int variant, int threads, const float* outer, const float* inner, uint64_t n, float* out);

// v <- momentum v + delta; params <- params - lr (momentum v + delta) with Nesterov, else params - lr v.
void take_step(int variant, int threads, float* params, float* v, const float* delta, uint64_t n, const OuterStep& step);

// Copies to memory that is not read soon.
void copy(int variant, int threads, const float* from, uint64_t n, float* to);

}  // namespace zeroband
