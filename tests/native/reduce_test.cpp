// Reductions of several members in one process, for the sanitizers: results, aborts and losses with all threads at work.

#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "support.h"

using namespace zeroband;

namespace {

constexpr double DEADLINE_S = 60;

void require_equal(const Members& members) {
    const size_t bytes = members.shape.numel * sizeof(float);
    for (const auto& out : members.out) REQUIRE(std::memcmp(out.data(), members.out[0].data(), bytes) == 0);
    double error = 0, size = 0, missing = 0;
    for (size_t i = 0; i < members.shape.numel; ++i) {
        double mean = 0;
        double taken = 0;
        for (const auto& in : members.in) mean += static_cast<double>(in[i]) / members.shape.world;
        for (const auto& one : members.error) taken += static_cast<double>(one[i]) / members.shape.world;
        missing = std::max(missing, std::abs(members.out[0][i] + taken - mean));
        error += (members.out[0][i] - mean) * (members.out[0][i] - mean);
        size += mean * mean;
    }
    REQUIRE(std::sqrt(error) <= 0.4 * std::sqrt(size));  // int4 around a ring
    REQUIRE(missing < 1e-5);  // the errors say what became of it
}

void reductions_agree(const std::vector<uint32_t>& worlds) {
    for (const uint32_t world : worlds)
        for (int codec = 0; codec < CODEC_COUNT; ++codec)
            for (const bool is_ring : {false, true})
                for (const bool is_sealed : {false, true}) {
                    Members members({world, 30011, static_cast<CodecId>(codec), is_ring, is_sealed});
                    for (uint64_t plan = 1; plan <= 2; ++plan) {
                        const auto running = members.start_all(plan);
                        for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
                        members.finish_all(running);
                        require_equal(members);
                    }
                }
}

void sites_agree() {
    for (const bool is_ring : {false, true})
        for (const CodecId codec : {FP32, INT8, INT4}) {
            Members members({6, 30011, codec, is_ring, true, 2, 2, 3});
            for (uint64_t plan = 1; plan <= 2; ++plan) {
                const auto running = members.start_all(plan);
                for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
                members.finish_all(running);
                require_equal(members);
            }
        }
}

// What one member brings encoded gives the mean that it gives when the engine encodes it; and the mean comes encoded.
void encoded_contribution_is_sent_as_it_is() {
    for (int id = 0; id < CODEC_COUNT; ++id)
        for (const bool is_ring : {false, true}) {
            const auto codec = static_cast<CodecId>(id);
            Members members({3, 30011, codec, is_ring, false});
            auto running = members.start_all(1);
            for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
            members.finish_all(running);
            const std::vector<float> expected = members.out[0];
            const std::vector<uint8_t> encoded = members.encoding(0);
            std::vector<uint8_t> mean(encoded.size());
            for (uint32_t member = 0; member < 3; ++member) {
                ReduceSpec spec = members.spec(member, 2);
                if (member == 0) {
                    spec.in = nullptr;
                    spec.encoded = encoded.data();
                    spec.encoded_out = mean.data();
                }
                running[member] = members.engines[member]->start(std::move(spec), members.links);
            }
            for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
            members.finish_all(running);
            const size_t bytes = expected.size() * sizeof(float);
            REQUIRE(is_ring || std::memcmp(members.out[1].data(), expected.data(), bytes) == 0);
            std::vector<float> decoded(expected.size());
            codec_of(codec).decode(mean.data(), decoded.size(), decoded.data());
            for (const auto& out : members.out) REQUIRE(std::memcmp(out.data(), decoded.data(), bytes) == 0);
        }
}

// Owners combine in several threads, and measure what they combine.
void combinations_agree() {
    for (const Robust robust : {Robust{CLIP, 0, 0}, Robust{TRIMMED, 0.25, 0}, Robust{CENTERED, 0, 2}}) {
        Members members({5, 30011, INT8, false, true});
        std::vector<std::vector<double>> measured(5, std::vector<double>(11));
        std::vector<RunningPtr> running;
        for (uint32_t member = 0; member < 5; ++member) {
            ReduceSpec spec = members.spec(member, 1);
            double* seen = measured[member].data();
            spec.robust = robust;
            spec.measured = {seen, seen + 5, seen + 10};
            running.push_back(members.engines[member]->start(std::move(spec), members.links));
        }
        for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
        members.finish_all(running);
        for (const auto& out : members.out)
            REQUIRE(std::memcmp(out.data(), members.out[0].data(), out.size() * sizeof(float)) == 0);
        for (const auto& seen : measured)
            for (const double value : seen) REQUIRE(value > 0);
    }
}

// Whoever is late finds the others' frames waiting.
void late_member_is_waited_for() {
    Members members({3, 100003, INT8, false, true});
    std::vector<RunningPtr> running(3);
    for (const uint32_t member : {0u, 1u}) running[member] = members.start(member, 1);
    REQUIRE(!running[0]->transfer->wait(0.05));
    running[2] = members.start(2, 1);
    for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
    members.finish_all(running);
    require_equal(members);
}

void aborted_reduction_leaves_the_links_as_they_were(const int rounds) {
    Members members({4, 400009, INT8, false, true});
    uint64_t plan = 1;
    for (int round = 0; round < rounds; ++round, plan += 2) {
        const auto aborted = members.start_all(plan);
        std::vector<std::thread> threads;
        for (uint32_t member = 0; member < 4; ++member)
            threads.emplace_back([&, member] {
                aborted[member]->transfer->wait(0.01 * round / rounds);
                members.engines[member]->finish(aborted[member]);
            });
        for (auto& thread : threads) thread.join();
        for (auto* buffers : {&members.out, &members.error})
            for (auto& buffer : *buffers) std::fill(buffer.begin(), buffer.end(), 1e9f);  // nobody writes there any more
        const auto running = members.start_all(plan + 1);
        for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
        members.finish_all(running);
        require_equal(members);
    }
}

void lost_link_ends_the_reduction_of_both(const int rounds) {
    for (int round = 0; round < rounds; ++round) {
        Members members({3, 4000037, INT8, false, false});
        const auto running = members.start_all(1);
        members.engines[0]->drop_link(1);
        REQUIRE(running[1]->transfer->wait(DEADLINE_S));
        REQUIRE(running[1]->transfer->state() == PEER_LOST && running[1]->transfer->detail() == 0);
        members.finish_all(running);
    }
}

void value_that_is_not_finite_is_named() {
    Members members({2, 30011, INT8, false, false});
    members.in[1][20123] = std::nanf("");
    const auto running = members.start_all(1);
    REQUIRE(running[1]->transfer->wait(DEADLINE_S));
    REQUIRE(running[1]->transfer->state() == NOT_FINITE && running[1]->transfer->detail() == 20123);
    members.finish_all(running);
}

// Of one member, half of the frames, then all.
void held_member_sends_what_it_may() {
    Members members({3, 100003, INT8, false, true});
    std::vector<RunningPtr> running;
    for (uint32_t member = 0; member < 3; ++member) {
        ReduceSpec spec = members.spec(member, 1);
        spec.allowed = member == 0 ? 0.5 : 1.0;
        running.push_back(members.engines[member]->start(std::move(spec), members.links));
    }
    while (!running[0]->transfer->has_sent_what_is_allowed()) std::this_thread::yield();
    REQUIRE(!running[1]->transfer->wait(0.05));
    const Traffic sent = running[0]->transfer->traffic(1);
    REQUIRE(sent.sent_bytes > 0 && sent.sent_bytes < sent.to_send_bytes);
    members.engines[0]->allow(running[0], 1.0);
    for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
    members.finish_all(running);
    require_equal(members);
}

}  // namespace

// An argument takes more rounds, and more members.
int main(int argc, char**) {
    const bool is_long = argc > 1;
    reductions_agree(is_long ? std::vector<uint32_t>{2, 3, 5} : std::vector<uint32_t>{3});
    sites_agree();
    encoded_contribution_is_sent_as_it_is();
    combinations_agree();
    late_member_is_waited_for();
    aborted_reduction_leaves_the_links_as_they_were(is_long ? 20 : 6);
    lost_link_ends_the_reduction_of_both(is_long ? 10 : 3);
    value_that_is_not_finite_is_named();
    held_member_sends_what_it_may();
    std::puts("ok");
}
