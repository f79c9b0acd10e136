#include "outer.h"

#include <cmath>
#include <system_error>
#include <thread>
#include <vector>

namespace zeroband {
namespace {

constexpr uint64_t LEAST_PART = 1 << 17;  // values that justify a thread: 0.1 ms of work
constexpr uint64_t LINE = 16;

const OuterKernels& kernels_of(int variant) {
    return outer_kernels_of(variant < 0 || variant >= variant_count() ? variant_count() - 1 : variant);
}

// Runs `work(start, n)` for each part in a separate thread, and for the first one in this thread.
template <class Work>
void in_parts(uint64_t numel, int threads, Work work) {
    const uint64_t most = numel / LEAST_PART, wanted = threads < 1 ? 1 : static_cast<uint64_t>(threads);
    const uint64_t parts = most < 1 ? 1 : most < wanted ? most : wanted;
    const uint64_t size = (numel / parts + LINE) / LINE * LINE;  // whole cache lines, to avoid false sharing
    std::vector<std::thread> others;
    others.reserve(parts);
    uint64_t start = numel < size ? numel : size;
    const uint64_t first = start;
    try {
        for (; start < numel; start += size)
            others.emplace_back([=] { work(start, numel - start < size ? numel - start : size); });
    } catch (const std::system_error&) {  // no more threads available
    }
    work(0, first);
    if (start < numel) work(start, numel - start);
    for (std::thread& other : others) other.join();
}

}  // namespace

float difference(int variant, int threads, const float* outer, const float* inner, uint64_t n, float* out) {
    const OuterKernels& kernels = kernels_of(variant);
    std::vector<float> found((n / LEAST_PART < 1 ? 1 : n / LEAST_PART) + 1, 0.0f);
    in_parts(n, threads, [&, outer, inner, out](uint64_t start, uint64_t size) {
        found[start / LEAST_PART] = kernels.difference(outer + start, inner + start, size, out + start);
    });
    float top = 0;
    for (const float each : found) {
        if (!(each <= top)) top = each;
        if (!std::isfinite(top)) break;
    }
    return top;
}

void take_step(int variant, int threads, float* params, float* v, const float* delta, uint64_t n, const OuterStep& step) {
    const OuterKernels& kernels = kernels_of(variant);
    const auto sgd = step.is_nesterov ? kernels.nesterov : kernels.plain_momentum;
    in_parts(n, threads, [=](uint64_t start, uint64_t size) {
        sgd(params + start, v + start, delta + start, size, step.lr, step.momentum);
    });
}

void copy(int variant, int threads, const float* from, uint64_t n, float* to) {
    const OuterKernels& kernels = kernels_of(variant);
    in_parts(n, threads, [&, from, to](uint64_t start, uint64_t size) { kernels.copy(from + start, size, to + start); });
}

}  // namespace zeroband
