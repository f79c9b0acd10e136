// What the native tests share: members of an operation in one process, joined by socket pairs.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "engine.h"

#define REQUIRE(condition)                                                     \
    do {                                                                       \
        if (!(condition)) {                                                    \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                      \
        }                                                                      \
    } while (false)

namespace zeroband {

constexpr double BEAT_S = 0.001;  // so often that beats stand between the frames of every test

struct Case {
    uint32_t world;
    uint64_t numel;
    CodecId codec;
    bool is_ring;
    bool is_sealed;
    uint32_t streams = 2;
    int threads = 2;
    uint32_t per_site = 1;  // members of a site, whose first one speaks for it; the last site may have fewer

    uint32_t speakers_before(uint32_t member) const { return (member + per_site - 1) / per_site; }
    uint32_t next_of(uint32_t member) const { return member % per_site == 0 ? member : member - 1; }
};

inline ReduceSpec spec_of(const Case& c, uint32_t self, uint64_t plan, const float* in, float* out) {
    ReduceSpec spec;
    spec.operation = {7, plan << 16, 1, 1, 0};
    spec.codec = c.codec;
    spec.is_ring = c.is_ring;
    spec.self = self;
    for (uint32_t member = 0; member < c.world; ++member) {
        spec.bounds.push_back(c.numel * c.speakers_before(member) / c.speakers_before(c.world) / 256 * 256);
        spec.shares.push_back(1.0f / static_cast<float>(c.world));
        spec.next.push_back(c.next_of(member));
        if (c.next_of(member) == member) spec.order.push_back(member);
    }
    spec.bounds.push_back(c.numel);
    while (spec.bounds[c.world - 1] != c.numel && c.next_of(c.world - 1) != c.world - 1) {  // what the last speaker owns
        for (uint32_t member = c.world - 1; c.next_of(member) != member; --member) spec.bounds[member] = c.numel;
    }
    spec.chunk_numel = 1024;
    spec.in = in;
    spec.out = out;
    return spec;
}

inline uint8_t* bytes_of(float* values) { return reinterpret_cast<uint8_t*>(values); }

constexpr uint32_t EVERYBODY = NOBODY;

// Payloads of other lengths for each member, none longer than 4 * numel bytes. To one receiver directly; to everybody
// through the member of each other site that has the sender's place in its own, as far as there is one.
inline GatherSpec gather_of(const Case& c, uint32_t self, uint64_t plan, const uint8_t* in, uint8_t* out,
                            uint32_t receiver = EVERYBODY) {
    GatherSpec spec;
    spec.operation = {7, plan << 16, 1, 1, 0};
    spec.self = self;
    const auto site = [&](uint32_t member) { return member / c.per_site; };
    const auto relay = [&](uint32_t sender, uint32_t member) {
        return std::min(site(member) * c.per_site + sender % c.per_site, c.world - 1);
    };
    for (uint32_t member = 0; member < c.world; ++member) {
        const bool is_near = site(member) == site(self), is_other = member != self;
        spec.lengths.push_back(4 * c.numel - 1500 * member);
        if (receiver != EVERYBODY) {
            spec.sources.push_back(self == receiver ? member : NOBODY);
            spec.receivers.push_back(is_other && member == receiver);
            spec.near.push_back(false);
            continue;
        }
        const uint32_t source = is_near ? member : relay(member, self);
        spec.sources.push_back(source == self ? member : source);
        spec.receivers.push_back(is_other && (is_near || member == relay(self, member)));
        spec.near.push_back(is_other && is_near);
    }
    spec.chunk_bytes = 1024;
    spec.in = in;
    spec.out = out;
    return spec;
}

// Engines of all members, each with links numbered like the others.
struct Members {
    explicit Members(const Case& c) : shape(c) {
        std::mt19937 random(static_cast<unsigned>(c.world));
        std::normal_distribution<float> normal;
        for (uint32_t member = 0; member < c.world; ++member) {
            engines.push_back(std::make_unique<Engine>(c.threads, BEAT_S));
            in.emplace_back(c.numel);
            out.emplace_back(c.numel);
            error.emplace_back(c.numel);
            for (float& value : in.back()) value = normal(random);
            links.push_back(member);
        }
        for (uint32_t a = 0; a < c.world; ++a)
            for (uint32_t b = a + 1; b < c.world; ++b)
                for (uint32_t stream = 0; stream < c.streams; ++stream) join(a, b, stream);
    }

    void join(uint32_t a, uint32_t b, uint32_t stream) {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        uint8_t forth[KEY_BYTES] = {1, static_cast<uint8_t>(a), static_cast<uint8_t>(b), static_cast<uint8_t>(stream)};
        uint8_t back[KEY_BYTES] = {2, static_cast<uint8_t>(a), static_cast<uint8_t>(b), static_cast<uint8_t>(stream)};
        const bool sealed = shape.is_sealed;
        engines[a]->add_stream(b, ends[0], sealed ? forth : nullptr, sealed ? back : nullptr);
        engines[b]->add_stream(a, ends[1], sealed ? back : nullptr, sealed ? forth : nullptr);
    }

    ReduceSpec spec(uint32_t member, uint64_t plan) {
        ReduceSpec spec = spec_of(shape, member, plan, in[member].data(), out[member].data());
        spec.error = error[member].data();
        return spec;
    }

    std::vector<uint8_t> encoding(uint32_t member) {
        std::vector<uint8_t> bytes(encoded_size(shape.codec, shape.numel));
        REQUIRE(codec_of(shape.codec).encode(in[member].data(), shape.numel, bytes.data()) < 0);
        return bytes;
    }

    RunningPtr start(uint32_t member, uint64_t plan) {
        return engines[member]->start(spec(member, plan), links);
    }

    std::vector<RunningPtr> start_all(uint64_t plan) {
        std::vector<RunningPtr> running;
        for (uint32_t member = 0; member < shape.world; ++member) running.push_back(start(member, plan));
        return running;
    }

    void finish_all(const std::vector<RunningPtr>& running) {
        for (uint32_t member = 0; member < shape.world; ++member) engines[member]->finish(running[member]);
    }

    const Case shape;
    std::vector<std::unique_ptr<Engine>> engines;
    std::vector<std::vector<float>> in, out, error;
    std::vector<uint32_t> links;
};

}  // namespace zeroband
