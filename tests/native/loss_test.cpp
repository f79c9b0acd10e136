// Members that die, hang up or give up at any moment of an operation, and what is left of it: every buffer is freed as
// soon as its operation has ended, links and engines are replaced at once, and the next operation goes well. For the
// sanitizers.

#include <algorithm>
#include <chrono>
#include <thread>

#include "support.h"

using namespace zeroband;

namespace {

constexpr double DEADLINE_S = 60;
constexpr uint32_t WORLD = 3;

enum Kind : unsigned { ALL_TO_ALL = 0, RING = 1, GATHER = 2, KINDS = 3 };
enum Disaster : unsigned { DIES = 0, HANGS_UP = 1, GIVES_UP = 2, DISASTERS = 3 };

// One member's share in an operation, in memory of its own that is freed with it.
struct Part {
    Part(Engine* of, RunningPtr (*begin)(Part&), const Case& shape, uint32_t self, uint64_t plan,
         std::vector<uint32_t> links)
        : engine(of), shape(shape), self(self), plan(plan), links(std::move(links)),
          in(shape.numel), out(shape.world * shape.numel), error(shape.numel) {
        std::mt19937 random(self + static_cast<unsigned>(plan));
        std::normal_distribution<float> normal;
        for (float& value : in) value = normal(random);
        running = begin(*this);
    }
    ~Part() { engine->finish(running); }

    Engine* const engine;
    const Case shape;
    const uint32_t self;
    const uint64_t plan;
    const std::vector<uint32_t> links;
    std::vector<float> in, out, error;
    RunningPtr running;
};

RunningPtr begin_reduction(Part& part) {
    ReduceSpec spec = spec_of(part.shape, part.self, part.plan, part.in.data(), part.out.data());
    spec.error = part.error.data();
    return part.engine->start(std::move(spec), part.links);
}

RunningPtr begin_gathering(Part& part) {
    GatherSpec spec = gather_of(part.shape, part.self, part.plan, bytes_of(part.in.data()), bytes_of(part.out.data()));
    return part.engine->start(std::move(spec), part.links);
}

using Parts = std::vector<std::unique_ptr<Part>>;

// Engines whose links have a new number whenever they are made.
struct Nodes {
    explicit Nodes(std::mt19937& random) : random(random) {
        for (auto& engine : engines) engine = std::make_unique<Engine>(1 + static_cast<int>(random() % 2), BEAT_S);
        for (uint32_t a = 0; a < WORLD; ++a)
            for (uint32_t b = a + 1; b < WORLD; ++b) join(a, b);
    }

    void join(uint32_t a, uint32_t b) {
        if (link[a][b] != 0) engines[a]->drop_link(link[a][b]);
        if (link[b][a] != 0) engines[b]->drop_link(link[b][a]);
        link[a][b] = link[b][a] = ++links_made;
        const bool is_sealed = random() % 2 == 0;
        for (unsigned stream = 1 + random() % 3; stream > 0; --stream) {
            int ends[2];
            REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
            const uint8_t forth[KEY_BYTES] = {1, static_cast<uint8_t>(stream)}, back[KEY_BYTES] = {2, static_cast<uint8_t>(stream)};
            engines[a]->add_stream(links_made, ends[0], is_sealed ? forth : nullptr, is_sealed ? back : nullptr);
            engines[b]->add_stream(links_made, ends[1], is_sealed ? back : nullptr, is_sealed ? forth : nullptr);
        }
    }

    // Another process in the place of one that died.
    void restart(uint32_t member) {
        engines[member] = std::make_unique<Engine>(1 + static_cast<int>(random() % 2), BEAT_S);
        for (uint32_t other = 0; other < WORLD; ++other)
            if (other != member) join(std::min(member, other), std::max(member, other));
    }

    Parts start(Kind kind, const std::vector<uint32_t>& members) {
        const auto world = static_cast<uint32_t>(members.size());
        const Case shape{world, 4096 + random() % 60000, random() % 2 ? INT8 : FP32, kind == RING, false};
        ++plan;
        Parts parts;
        for (uint32_t at = 0; at < world; ++at) {
            std::vector<uint32_t> links;
            for (const uint32_t other : members) links.push_back(link[members[at]][other]);
            const auto begin = kind == GATHER ? begin_gathering : begin_reduction;
            parts.push_back(std::make_unique<Part>(engines[members[at]].get(), begin, shape, at, plan, links));
        }
        return parts;
    }

    // All of these members come to the right end.
    void require_works(Kind kind, const std::vector<uint32_t>& members) {
        const Parts parts = start(kind, members);
        for (const auto& part : parts)
            REQUIRE(part->running->transfer->wait(DEADLINE_S) && part->running->transfer->state() == DONE);
        for (const auto& part : parts) {
            REQUIRE(std::memcmp(part->out.data(), parts[0]->out.data(), part->out.size() * sizeof(float)) == 0);
            if (kind == GATHER) REQUIRE(std::memcmp(parts[0]->out.data(), parts[0]->in.data(), 4 * parts[0]->in.size()) == 0);
        }
    }

    std::mt19937& random;
    std::unique_ptr<Engine> engines[WORLD];
    uint32_t link[WORLD][WORLD] = {};
    uint32_t links_made = 0;
    uint64_t plan = 0;
};

void pause_us(unsigned most, unsigned random) { std::this_thread::sleep_for(std::chrono::microseconds(random % most)); }

void strike(Nodes& nodes, Parts& parts, uint32_t victim, Disaster disaster) {
    std::mt19937& random = nodes.random;
    // Those that are left give up at moments of their own: what they have is freed while frames still come for it.
    std::vector<std::thread> survivors;
    const unsigned moments[WORLD] = {static_cast<unsigned>(random()), static_cast<unsigned>(random()), static_cast<unsigned>(random())};
    pause_us(400, static_cast<unsigned>(random()));
    for (uint32_t member = 0; member < WORLD; ++member)
        if (member != victim)
            survivors.emplace_back([&parts, member, moment = moments[member]] {
                parts[member]->running->transfer->wait(1e-6 * (moment % 2000));
                const int state = parts[member]->running->transfer->state();
                REQUIRE(state == RUNNING || state == DONE || state == PEER_LOST);
                parts[member].reset();
            });
    if (disaster == HANGS_UP) nodes.engines[victim]->drop_link(nodes.link[victim][(victim + 1) % WORLD]);
    if (disaster == DIES) nodes.engines[victim]->close();
    parts[victim].reset();
    if (disaster == DIES) nodes.engines[victim].reset();
    for (auto& survivor : survivors) survivor.join();
}

void operations_survive_disasters(long disasters) {
    std::mt19937 random(1);
    Nodes nodes(random);
    for (long number = 0; number < disasters; ++number) {
        const auto kind = static_cast<Kind>(random() % KINDS);
        const auto disaster = static_cast<Disaster>(random() % DISASTERS);
        const uint32_t victim = random() % WORLD, next = (victim + 1) % WORLD, last = (victim + 2) % WORLD;
        Parts parts = nodes.start(kind, {0, 1, 2});
        strike(nodes, parts, victim, disaster);
        if (disaster == DIES) {
            nodes.require_works(kind, {std::min(next, last), std::max(next, last)});
            nodes.restart(victim);
        }
        if (disaster == HANGS_UP) nodes.join(std::min(victim, next), std::max(victim, next));
        nodes.require_works(static_cast<Kind>(random() % KINDS), {0, 1, 2});
    }
}

// What others still ask of an engine that is closed has an answer, and no operation waits for ever.
void closed_engine_can_be_asked() {
    for (int round = 0; round < 50; ++round) {
        std::mt19937 random(static_cast<unsigned>(round));
        Nodes nodes(random);
        Parts parts = nodes.start(GATHER, {0, 1, 2});
        std::thread closing([&nodes] { nodes.engines[0]->close(); });
        Parts late = nodes.start(ALL_TO_ALL, {0, 1, 2});
        REQUIRE(late[0]->running->transfer->wait(DEADLINE_S));
        nodes.join(0, 1);
        closing.join();
        REQUIRE(!nodes.engines[0]->link_state(nodes.link[0][1]).is_up);
        REQUIRE(parts[0]->running->transfer->state() != RUNNING);
    }
}

}  // namespace

int main(int argc, char** argv) {
    operations_survive_disasters(argc > 1 ? std::atol(argv[1]) : 100);
    closed_engine_can_be_asked();
    std::puts("ok");
}
