// Numbers that no honest caller or member gives: each entry point of the C interface refuses them with a text, or does
// with them what it says; and values of a member that are not finite, or larger than announced, end the transfer.

#include "api.cpp"
#include "support.h"

using namespace zeroband;

namespace {

constexpr uint64_t NUMEL = 3000;
constexpr uint32_t WORLD = 3;
constexpr double DEADLINE_S = 60;

const float INF = std::numeric_limits<float>::infinity(), NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// The arrays that a specification points to, longer than any world that is not refused.
struct Arrays {
    std::vector<uint64_t> bounds = std::vector<uint64_t>(MOST_MEMBERS + 1, NUMEL), lengths = bounds;
    std::vector<float> shares = std::vector<float>(MOST_MEMBERS, 0.0f), largest = shares;
    std::vector<uint32_t> order = std::vector<uint32_t>(MOST_MEMBERS, 0), links = order, next = order, sources = order;
    std::vector<uint8_t> receivers = std::vector<uint8_t>(MOST_MEMBERS, 0), near = receivers;
    std::vector<float> in = std::vector<float>(4 * NUMEL, 1.0f), out = in, error = in;

    zb_spec reduction(uint32_t self, uint64_t plan) {
        for (uint32_t member = 0; member < WORLD; ++member) {
            bounds[member] = 1024 * member;
            shares[member] = 1.0f / WORLD;
            largest[member] = 1.0f;
            order[member] = links[member] = next[member] = member;
        }
        bounds[WORLD] = NUMEL;
        return {7,  plan << 16, 1, 1, 0, INT8, 0, WORLD, WORLD, self, 1024, bounds.data(), shares.data(), order.data(), links.data(),
                next.data(), in.data(), out.data(), error.data(), nullptr, nullptr, 1.0, largest.data()};
    }

    zb_gather_spec gathering(uint32_t self, uint64_t plan) {
        for (uint32_t member = 0; member < WORLD; ++member) {
            lengths[member] = NUMEL;
            links[member] = sources[member] = member;
            receivers[member] = near[member] = member != self;
        }
        return {7, plan << 16, 1, 1, 0, WORLD, self, 1024, lengths.data(), links.data(), sources.data(), receivers.data(),
                near.data(), bytes_of(in.data()), bytes_of(out.data()), 1.0};
    }
};

template <class Number>
Number odd(std::mt19937& random) {
    const Number numbers[] = {static_cast<Number>(-1), static_cast<Number>(-300), 0, 1, 2, 3, 255, 256, 257, 1024, 70000,
                              std::numeric_limits<Number>::max(), std::numeric_limits<Number>::min(),
                              static_cast<Number>(std::numeric_limits<Number>::max() / 2)};
    return numbers[random() % (sizeof numbers / sizeof *numbers)];
}

template <class Real>
Real odd_real(std::mt19937& random) {
    const Real numbers[] = {-1, static_cast<Real>(-0.0), 0, static_cast<Real>(1e-45), static_cast<Real>(0.5), 1, static_cast<Real>(3e38),
                            static_cast<Real>(INF), static_cast<Real>(-INF), static_cast<Real>(NOT_A_NUMBER)};
    return numbers[random() % (sizeof numbers / sizeof *numbers)];
}

// Ends what was started; says whether it was.
bool was_started(Engine* engine, RunningPtr* running) {
    if (running == nullptr) {
        REQUIRE(zb_problem()[0] != 0);
        return false;
    }
    zb_traffic traffic;
    REQUIRE(zb_transfer_traffic(running, 0, &traffic) == 0);
    REQUIRE(zb_transfer_traffic(running, 1 << 20, &traffic) == INVALID);
    for (const double seconds : {-1.0, 0.0, static_cast<double>(NOT_A_NUMBER)}) zb_transfer_wait(running, seconds);
    for (const double share : {-1.0, static_cast<double>(NOT_A_NUMBER), 1e300}) zb_transfer_allow(engine, running, share);
    zb_transfer_end(engine, running);
    zb_transfer_free(running);
    return true;
}

void reductions_of_odd_numbers_are_refused_or_run(const int rounds) {
    std::mt19937 random(1);
    Engine* engine = zb_engine_open(1, 1.0);
    REQUIRE(engine != nullptr);
    Arrays arrays;
    REQUIRE(was_started(engine, [&] { auto spec = arrays.reduction(0, 1); return zb_reduce_start(engine, &spec); }()));
    int started = 0;
    for (int round = 0; round < rounds; ++round) {
        zb_spec spec = arrays.reduction(random() % WORLD, round + 2);
        for (unsigned change = 1 + random() % 2; change > 0; --change) {
            const uint32_t at = random() % (WORLD + 1);
            switch (random() % 17) {
                case 0: spec.codec = odd<int32_t>(random); break;
                case 1: spec.world = odd<uint32_t>(random); break;
                case 2: spec.speakers = odd<uint32_t>(random); break;
                case 3: spec.self = odd<uint32_t>(random); break;
                case 4: spec.chunk_numel = odd<uint64_t>(random); break;
                case 5: arrays.bounds[at] = odd<uint64_t>(random); break;
                case 6: arrays.shares[at] = odd_real<float>(random); break;
                case 7: arrays.largest[at] = odd_real<float>(random); break;
                case 8: arrays.order[at] = odd<uint32_t>(random); break;
                case 9: arrays.next[at] = odd<uint32_t>(random); break;
                case 10: arrays.links[at] = odd<uint32_t>(random); break;
                case 11: spec.allowed = odd_real<double>(random); break;
                case 12: spec.lane = odd<uint32_t>(random); break;
                case 13: spec.shares = nullptr; break;
                case 14: spec.in = nullptr; break;
                case 15: spec.encoded_out = bytes_of(arrays.error.data()); break;
                default: spec.is_ring = 1; break;
            }
        }
        if (arrays.bounds[std::min(spec.world, MOST_MEMBERS)] > NUMEL) continue;  // the buffers here are no longer
        started += was_started(engine, zb_reduce_start(engine, &spec));
    }
    REQUIRE(started > rounds / 20 && started < rounds * 9 / 10);
    for (const float share : {-1.0f, -1e-30f, INF, NOT_A_NUMBER}) {
        zb_spec spec = arrays.reduction(0, 1);
        arrays.shares[1] = share;
        REQUIRE(zb_reduce_start(engine, &spec) == nullptr && std::string(zb_problem()).find("shares") == 0);
    }
    zb_engine_close(engine);
    zb_engine_free(engine);
}

void gatherings_of_odd_numbers_are_refused_or_run(const int rounds) {
    std::mt19937 random(2);
    Engine* engine = zb_engine_open(1, 1.0);
    Arrays arrays;
    REQUIRE(was_started(engine, [&] { auto spec = arrays.gathering(0, 1); return zb_gather_start(engine, &spec); }()));
    int started = 0;
    for (int round = 0; round < rounds; ++round) {
        zb_gather_spec spec = arrays.gathering(random() % WORLD, round + 2);
        const uint32_t at = random() % WORLD;
        switch (random() % 11) {
            case 0: spec.world = odd<uint32_t>(random); break;
            case 1: spec.self = odd<uint32_t>(random); break;
            case 2: spec.chunk_bytes = odd<uint64_t>(random); break;
            case 3: arrays.lengths[at] = odd<uint64_t>(random); break;
            case 4: arrays.sources[at] = odd<uint32_t>(random); break;
            case 5: arrays.receivers[at] = static_cast<uint8_t>(random()); break;
            case 6: arrays.near[at] = static_cast<uint8_t>(random()); break;
            case 7: spec.allowed = odd_real<double>(random); break;
            case 8: spec.out = nullptr; break;
            case 9: spec.sources = nullptr; break;
            default: spec.lane = odd<uint32_t>(random); break;
        }
        uint64_t bytes = 0;
        for (uint32_t member = 0; member < std::min(spec.world, WORLD); ++member) bytes += std::min(arrays.lengths[member], uint64_t{1} << 60);
        if (spec.world > WORLD || (bytes > 4 * NUMEL && bytes < 1ull << 43)) {
            REQUIRE(spec.world <= MOST_MEMBERS || zb_gather_start(engine, &spec) == nullptr);
            continue;  // the buffers here are no longer
        }
        started += was_started(engine, zb_gather_start(engine, &spec));
    }
    REQUIRE(started > rounds / 20 && started < rounds * 9 / 10);
    zb_engine_close(engine);
    zb_engine_free(engine);
}

void codecs_refuse_odd_numbers() {
    std::vector<float> values(16, 1.0f);
    std::vector<uint8_t> bytes(256);
    float found;
    for (const int codec : {-1, static_cast<int>(CODEC_COUNT), 1 << 30}) {
        REQUIRE(zb_encoded_size(codec, 16) == -1 && zb_encode(codec, -1, values.data(), 16, bytes.data()) == INVALID);
        REQUIRE(zb_decode(codec, -1, bytes.data(), 16, values.data()) == INVALID);
        REQUIRE(zb_add(codec, -1, bytes.data(), 16, 1, values.data()) == INVALID);
        REQUIRE(zb_largest(codec, -1, bytes.data(), 16, &found) == INVALID);
    }
    for (int codec = 0; codec < CODEC_COUNT; ++codec) {
        REQUIRE(zb_decode(codec, variant_count(), bytes.data(), 16, values.data()) == INVALID);
        REQUIRE(zb_decode(codec, -1, bytes.data(), UINT64_MAX, values.data()) == INVALID);
        REQUIRE(zb_decode(codec, -1, nullptr, 16, values.data()) == INVALID);
        REQUIRE(zb_decode(codec, -1, nullptr, 0, nullptr) == 0);
        for (const float weight : {-1.0f, INF, NOT_A_NUMBER})
            REQUIRE(zb_add(codec, -1, bytes.data(), 16, weight, values.data()) == INVALID);
    }
    for (const double beat_s : {0.0, -1.0, 1e300, static_cast<double>(NOT_A_NUMBER)}) REQUIRE(zb_engine_open(1, beat_s) == nullptr);
    REQUIRE(zb_engine_open(1 << 30, 1.0) == nullptr);
}

void passes_refuse_odd_numbers() {
    std::vector<float> a(16, 1.0f), b(16, 2.0f), c(16, 3.0f);
    float found;
    const auto difference = [&](int variant, int threads, uint64_t n, float* out) {
        return zb_difference(variant, threads, a.data(), b.data(), n, out, &found);
    };
    const auto sgd = [&](int variant, int threads, uint64_t n, const float* delta, float lr, float factor) {
        return zb_outer_sgd(variant, threads, a.data(), b.data(), delta, n, lr, factor, 1);
    };
    for (const int threads : {-1, 0, MOST_THREADS + 1, 1 << 30}) {
        REQUIRE(difference(-1, threads, 16, c.data()) == INVALID && sgd(-1, threads, 16, c.data(), 1, 1) == INVALID);
        REQUIRE(zb_copy(-1, threads, a.data(), 16, c.data()) == INVALID);
    }
    for (const uint64_t n : {uint64_t{1} << 41, UINT64_MAX}) {
        REQUIRE(difference(-1, 1, n, c.data()) == INVALID && sgd(-1, 1, n, c.data(), 1, 1) == INVALID);
        REQUIRE(zb_copy(-1, 1, a.data(), n, c.data()) == INVALID);
    }
    REQUIRE(difference(variant_count(), 1, 16, c.data()) == INVALID && sgd(variant_count(), 1, 16, c.data(), 1, 1) == INVALID);
    REQUIRE(difference(-1, 1, 16, nullptr) == INVALID && sgd(-1, 1, 16, nullptr, 1, 1) == INVALID);
    REQUIRE(zb_copy(-1, 1, nullptr, 16, c.data()) == INVALID && zb_copy(-1, 1, nullptr, 0, nullptr) == 0);
    REQUIRE(zb_difference(-1, 1, a.data(), b.data(), 16, c.data(), nullptr) == INVALID);
    REQUIRE(zb_difference(-1, 1, nullptr, nullptr, 0, nullptr, &found) == 0 && found == 0);
    for (const float odd : {INF, -INF, NOT_A_NUMBER})
        REQUIRE(sgd(-1, 1, 16, c.data(), odd, 1) == INVALID && sgd(-1, 1, 16, c.data(), 1, odd) == INVALID);
    REQUIRE(a[0] == 1 && b[0] == 2 && c[0] == 3);
}

// The threads of a pass write what one alone does, and nothing beside it.
void passes_write_where_they_should() {
    for (const size_t n : {size_t{1}, size_t{17}, size_t{262144}, size_t{393233}})
        for (int variant = 0; variant < variant_count(); ++variant)
            for (const int threads : {1, 3}) {
                std::vector<float> outer(n), inner(n), out(n + 2, 7.0f), v(n, 0.0f), to(n + 2, 7.0f);
                for (size_t i = 0; i < n; ++i) outer[i] = static_cast<float>(i % 1013), inner[i] = static_cast<float>(i % 7);
                float found;
                REQUIRE(zb_difference(variant, threads, outer.data(), inner.data(), n, out.data() + 1, &found) == 0);
                float top = 0;
                for (size_t i = 0; i < n; ++i) {
                    REQUIRE(out[i + 1] == outer[i] - inner[i]);
                    top = std::max(top, std::abs(out[i + 1]));
                }
                REQUIRE(found == top && out[0] == 7 && out[n + 1] == 7);
                std::vector<float> before = outer;
                REQUIRE(zb_outer_sgd(variant, threads, outer.data(), v.data(), inner.data(), n, 0.5f, 0.5f, 1) == 0);
                for (size_t i = 0; i < n; ++i) REQUIRE(v[i] == inner[i] && outer[i] == before[i] - 0.75f * inner[i]);
                REQUIRE(zb_copy(variant, threads, outer.data(), n, to.data() + 1) == 0);
                REQUIRE(std::equal(outer.begin(), outer.end(), to.begin() + 1) && to[0] == 7 && to[n + 1] == 7);
            }
}

// Of any bytes: what `largest` says of them is what decoding them shows.
void largest_is_that_of_the_decoded_values() {
    std::mt19937 random(3);
    for (int id = 0; id < CODEC_COUNT; ++id)
        for (int variant = 0; variant < variant_count(); ++variant)
            for (const size_t n : {1, 2, 127, 128, 129, 255, 256, 257, 300, 1025})
                for (int round = 0; round < 20; ++round) {
                    const Codec& codec = codec_of(static_cast<CodecId>(id), variant);
                    std::vector<uint8_t> bytes(encoded_size(static_cast<CodecId>(id), n));
                    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
                    std::vector<float> values(n);
                    codec.decode(bytes.data(), n, values.data());
                    float top = 0;
                    bool is_finite = true;
                    for (const float value : values) {
                        is_finite = is_finite && std::isfinite(value);
                        top = std::max(top, std::abs(value));
                    }
                    const float found = codec.largest(bytes.data(), n);
                    REQUIRE(is_finite ? found == top : !std::isfinite(found));
                }
}

// A frame of values whose first block is multiplied by something, as a member that alters it would send it.
PacketPtr altered(PacketPtr packet, float by) {
    if (by == 1.0f) return packet;
    const auto codec = static_cast<CodecId>(packet->frame.codec);
    if (codec == BF16) {
        packet->payload()[0] = packet->payload()[1] = by != by ? 0xff : 0x7e;  // not a number; 8e37
        return packet;
    }
    float first;
    std::memcpy(&first, packet->payload(), 4);
    first *= by;
    std::memcpy(packet->payload(), &first, 4);
    return packet;
}

// Parts, partial sums and means of a member that are no numbers, or larger than any value that was announced.
void values_out_of_range_are_refused_and_their_sender_is_named() {
    for (int id = 0; id < CODEC_COUNT; ++id)
        for (const bool is_ring : {false, true})
            for (const float by : {1.0f, 1e20f, NOT_A_NUMBER, INF}) {
                const Case shape = {2, 3000, static_cast<CodecId>(id), is_ring, false};
                const auto pool = std::make_shared<PacketPool>();
                std::vector<float> in(shape.numel, 1.0f), out(shape.numel), out_there(shape.numel);
                ReduceSpec spec = spec_of(shape, 0, 1, in.data(), out.data());
                ReduceSpec there = spec_of(shape, 1, 1, in.data(), out_there.data());
                spec.largest = there.largest = {1.0f, 1.0f};
                Reduce honest(spec, pool), other(there, pool);
                honest.begin();
                other.begin();
                std::vector<uint32_t> awakened;
                while (PacketPtr packet = honest.next(1)) other.receive(0, packet, awakened);
                int means = 0;
                while (PacketPtr packet = other.next(0)) {
                    means += packet->frame.kind == FINAL;
                    const bool is_altered = packet->frame.kind == FINAL || by == INF;
                    honest.receive(1, is_altered ? altered(packet, by) : packet, awakened);
                    while (PacketPtr back = honest.next(1)) other.receive(0, back, awakened);
                }
                REQUIRE(means > 0);
                REQUIRE(by == 1.0f ? honest.state() != OUT_OF_RANGE : honest.state() == OUT_OF_RANGE && honest.detail() == 1);
            }
}

// One that sends more than it announced is named by all who get it.
void member_that_sends_more_than_it_announced_is_named() {
    Members members({3, 30011, INT8, false, true});
    for (float& value : members.in[2]) value *= 1e20f;
    std::vector<RunningPtr> running;
    for (uint32_t member = 0; member < 3; ++member) {
        ReduceSpec spec = members.spec(member, 1);
        spec.largest = {10.0f, 10.0f, 10.0f};
        running.push_back(members.engines[member]->start(std::move(spec), members.links));
    }
    for (const uint32_t member : {0u, 1u}) {
        REQUIRE(running[member]->transfer->wait(DEADLINE_S));
        REQUIRE(running[member]->transfer->state() == OUT_OF_RANGE && running[member]->transfer->detail() == 2);
    }
    members.finish_all(running);
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 2000;
    codecs_refuse_odd_numbers();
    passes_refuse_odd_numbers();
    passes_write_where_they_should();
    largest_is_that_of_the_decoded_values();
    reductions_of_odd_numbers_are_refused_or_run(rounds);
    gatherings_of_odd_numbers_are_refused_or_run(rounds);
    values_out_of_range_are_refused_and_their_sender_is_named();
    member_that_sends_more_than_it_announced_is_named();
    std::puts("ok");
}
