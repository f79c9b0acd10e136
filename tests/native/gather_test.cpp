// Gatherings of several engines in one process: all of them, aborted ones, ones that lose a link. For the sanitizers.

#include <algorithm>
#include <thread>

#include "support.h"

using namespace zeroband;

namespace {

constexpr double DEADLINE_S = 60;

// What each member gets: the payloads of all, or nothing.
struct Gathering {
    explicit Gathering(const Case& shape) : members(shape), out(shape.world) {}

    GatherSpec spec(uint32_t member, uint64_t plan, uint32_t receiver = EVERYBODY) {
        GatherSpec made = gather_of(members.shape, member, plan, bytes_of(members.in[member].data()), nullptr, receiver);
        uint64_t total = 0;
        for (const uint64_t length : made.lengths) total += length;
        if (out[member].empty()) out[member].assign(total, 0xEE);
        made.out = out[member].data();
        return made;
    }

    // `allowed`: share of its frames that member 0 may send.
    std::vector<RunningPtr> start_all(uint64_t plan, uint32_t receiver = EVERYBODY, double allowed = 1) {
        std::vector<RunningPtr> running;
        for (uint32_t member = 0; member < members.shape.world; ++member) {
            GatherSpec made = spec(member, plan, receiver);
            if (member == 0) made.allowed = allowed;
            running.push_back(members.engines[member]->start(std::move(made), members.links));
        }
        return running;
    }

    void require_done(const std::vector<RunningPtr>& running) {
        for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S) && one->transfer->state() == DONE);
        members.finish_all(running);
    }

    // A member that received has every payload; one that did not has what was there before.
    void require_payloads(uint32_t receiver = EVERYBODY) {
        for (uint32_t member = 0; member < members.shape.world; ++member) {
            const bool receives = receiver == EVERYBODY || receiver == member;
            const std::vector<uint64_t> lengths = spec(member, 0).lengths;
            uint64_t at = 0;
            for (uint32_t sender = 0; sender < members.shape.world; at += lengths[sender++])
                if (receives)
                    REQUIRE(std::memcmp(out[member].data() + at, members.in[sender].data(), lengths[sender]) == 0);
            const auto is_untouched = [](uint8_t byte) { return byte == 0xEE; };
            REQUIRE(receives || std::all_of(out[member].begin(), out[member].end(), is_untouched));
            std::fill(out[member].begin(), out[member].end(), uint8_t{0xEE});
        }
    }

    Members members;
    std::vector<std::vector<uint8_t>> out;
};

void members_have_all_payloads() {
    for (const uint32_t world : {2u, 3u, 5u})
        for (const bool is_sealed : {false, true}) {
            Gathering gathering({world, 30011, FP32, false, is_sealed});
            uint64_t plan = 0;
            for (const uint32_t receiver : {EVERYBODY, 0u, world - 1, EVERYBODY}) {
                gathering.require_done(gathering.start_all(++plan, receiver));
                gathering.require_payloads(receiver);
            }
        }
}

// Each payload comes to a site once, whatever is near it; several streams and threads, sites of other sizes.
void payloads_cross_once_into_each_site() {
    for (const uint32_t world : {4u, 7u})
        for (const uint32_t per_site : {2u, 3u}) {
            Gathering gathering({world, 30011, FP32, false, world == 7, 2, 2, per_site});
            for (uint64_t plan = 1; plan < 3; ++plan) {
                const auto running = gathering.start_all(plan);
                for (const auto& one : running) REQUIRE(one->transfer->wait(DEADLINE_S));
                for (uint32_t member = 0; member < world; ++member) {
                    uint64_t wide = 0, sites = (world + per_site - 1) / per_site;
                    for (uint32_t other = 0; other < world; ++other)
                        if (other / per_site != member / per_site) wide += running[member]->transfer->traffic(other).sent_bytes;
                    REQUIRE(wide == (sites - 1) * gathering.spec(member, 0).lengths[member]);
                }
                gathering.require_done(running);
                gathering.require_payloads();
            }
        }
}

// Whoever loses a link that it needs ends, and names the member; the others are told by the store and ended.
void lost_relay_ends_the_gathering_of_those_near_it() {
    for (int round = 0; round < 10; ++round) {
        Gathering gathering({4, 100003, FP32, false, true, 2, 2, 2});
        const auto running = gathering.start_all(1, EVERYBODY, 0.1);
        running[1]->transfer->wait(0.0005 * round);
        gathering.members.engines[2].reset();  // passes on what comes from 0, and is near 3
        for (const uint32_t member : {0u, 3u}) {
            REQUIRE(running[member]->transfer->wait(DEADLINE_S));
            REQUIRE(running[member]->transfer->state() == PEER_LOST && running[member]->transfer->detail() == 2);
        }
        REQUIRE(running[1]->transfer->state() == RUNNING);
        for (const uint32_t member : {0u, 1u, 3u}) gathering.members.engines[member]->finish(running[member]);
    }
}

void routes_that_are_none_are_refused() {
    Gathering gathering({4, 30011, FP32, false, false, 2, 2, 2});
    const GatherSpec good = gathering.spec(1, 1);
    REQUIRE(problem_of(good) == nullptr);
    GatherSpec spec = good;
    spec.sources[2] = 4;
    REQUIRE(problem_of(spec) != nullptr);
    spec = good;
    spec.sources[2] = 1;
    REQUIRE(problem_of(spec) != nullptr);
    spec = good;
    spec.sources[1] = 0;
    REQUIRE(problem_of(spec) != nullptr);
    spec = good;
    spec.near[1] = true;
    REQUIRE(problem_of(spec) != nullptr);
    spec = good;
    spec.receivers[1] = true;
    REQUIRE(problem_of(spec) != nullptr);
}

// Of a member's payload: from its sender or the relay at the own site, whoever knows the key.
void payloads_are_taken_from_their_sources_alone() {
    Gathering gathering({4, 30011, FP32, false, false, 2, 2, 2});
    const GatherSpec spec = gathering.spec(1, 1);
    const Gather gather(spec, std::make_shared<PacketPool>());
    const std::vector<uint32_t> sources = {0, NOBODY, 0, 3};
    for (uint32_t sender = 0; sender < 4; ++sender)
        for (uint32_t peer = 0; peer < 4; ++peer)
            REQUIRE(gather.expects(peer, {spec.operation, PAYLOAD, NO_CODEC, sender, 0, 1024}) == (peer == sources[sender]));
}

void aborted_gathering_leaves_the_links_as_they_were(uint32_t per_site, int rounds) {
    Gathering gathering({4, 100003, FP32, false, true, 2, 2, per_site});
    uint64_t plan = 1;
    for (int round = 0; round < rounds; ++round, plan += 2) {
        const auto aborted = gathering.start_all(plan);
        std::vector<std::thread> threads;
        for (uint32_t member = 0; member < 4; ++member)
            threads.emplace_back([&, member] {
                aborted[member]->transfer->wait(0.0005 * round);
                gathering.members.engines[member]->finish(aborted[member]);
            });
        for (auto& thread : threads) thread.join();
        for (auto& bytes : gathering.out) std::fill(bytes.begin(), bytes.end(), uint8_t{0xEE});
        gathering.require_done(gathering.start_all(plan + 1));
        gathering.require_payloads();
    }
}

void lost_link_ends_the_gathering_of_both() {
    for (int round = 0; round < 10; ++round) {
        Gathering gathering({3, 100003, FP32, false, false});
        const auto running = gathering.start_all(1, EVERYBODY, 0.5);
        gathering.members.engines[0]->drop_link(1);
        REQUIRE(running[1]->transfer->wait(DEADLINE_S));
        REQUIRE(running[1]->transfer->state() == PEER_LOST && running[1]->transfer->detail() == 0);
        gathering.members.finish_all(running);
    }
}

// A reduction and a gathering of one plan, on lanes of their own, go on beside each other.
void operations_of_one_plan_do_not_mix() {
    Gathering gathering({3, 100003, INT8, false, true});
    const auto reductions = gathering.members.start_all(1);
    std::vector<RunningPtr> running;
    for (uint32_t member = 0; member < 3; ++member) {
        GatherSpec spec = gathering.spec(member, 1);
        spec.operation.lane = 1;
        running.push_back(gathering.members.engines[member]->start(std::move(spec), gathering.members.links));
    }
    gathering.require_done(running);
    gathering.require_done(reductions);
    gathering.require_payloads();
}

}  // namespace

int main() {
    members_have_all_payloads();
    payloads_cross_once_into_each_site();
    lost_relay_ends_the_gathering_of_those_near_it();
    routes_that_are_none_are_refused();
    payloads_are_taken_from_their_sources_alone();
    aborted_gathering_leaves_the_links_as_they_were(1, 20);
    aborted_gathering_leaves_the_links_as_they_were(2, 10);
    lost_link_ends_the_gathering_of_both();
    operations_of_one_plan_do_not_mix();
    std::puts("ok");
}
