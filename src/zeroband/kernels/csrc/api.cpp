// C interface for Python's ctypes. No exception escapes; null or a negative number is an error, described by
// `zb_problem`. All numbers are validated, since they may come from other members.

#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "codec.h"
#include "engine.h"
#include "outer.h"
#include "seal.h"

using namespace zeroband;

namespace {

constexpr int INVALID = -2;
constexpr int MOST_THREADS = 1024;
constexpr double LONGEST_S = 1e6;

thread_local std::string problem;

// Stores a problem; returns whether there is one.
bool refuses(const char* why) {
    if (why != nullptr) problem = why;
    return why != nullptr;
}

// Converts exceptions to null and a stored problem.
template <class Make>
auto guarded(Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::exception& error) {
        problem = error.what();
    } catch (...) {
        problem = "an unknown exception";
    }
    return {};
}

bool is_codec(int codec) { return codec >= 0 && codec < CODEC_COUNT; }

const char* problem_of_values(int codec, int variant, uint64_t n, const void* from, const void* to) {
    if (!is_codec(codec)) return "there is no such codec";
    if (variant >= variant_count()) return "there is no such variant";
    if (n > MOST_NUMEL) return "there are 2^40 values at most";
    return n > 0 && (from == nullptr || to == nullptr) ? "a buffer is missing" : nullptr;
}

const Codec& variant_of(int codec, int variant) {
    const auto id = static_cast<CodecId>(codec);
    return variant < 0 ? codec_of(id) : codec_of(id, variant);
}

bool is_rule(int rule, double trim) { return rule >= PLAIN && rule < RULE_COUNT && trim >= 0 && trim < 0.5; }

const char* problem_of_pass(int variant, int threads, uint64_t n, const void* first, const void* second, const void* third) {
    if (variant >= variant_count()) return "there is no such variant";
    if (threads < 1 || threads > MOST_THREADS) return "a pass has 1 to 1024 threads";
    if (n > MOST_NUMEL) return "there are 2^40 values at most";
    return n > 0 && (first == nullptr || second == nullptr || third == nullptr) ? "a buffer is missing" : nullptr;
}

Robust robust_of(int rule, double trim, uint32_t iterations) {
    return {static_cast<RobustRule>(rule), trim, iterations};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

struct zb_spec {
    uint64_t run, plan;
    uint32_t epoch, round, lane;
    int32_t codec, is_ring;
    uint32_t world, speakers, self;
    uint64_t chunk_numel;
    const uint64_t* bounds;  // world + 1
    const float* shares;     // world
    const uint32_t* order;   // `speakers`
    const uint32_t* links;   // world
    const uint32_t* next;    // world: next member in its site's chain
    const float* in;
    float* out;
    float* error;  // may be null
    const uint8_t* encoded;  // may be null; replaces `in`
    uint8_t* encoded_out;    // may be null
    double allowed;
    const float* largest;  // world: largest |value| announced by each member; may be null
    int32_t rule;  // a RobustRule
    uint32_t iterations;
    double trim;
    double* measured;  // 2 * world + 1 if the rule is not PLAIN: dots, squares, square of the result
    const uint32_t* hash_key;  // may be null, with `hashes`: key as for `zb_hash`, for PIECE values
    uint64_t* hashes;           // world * pieces of the own shard; pieces do not span chunks
};

struct zb_gather_spec {
    uint64_t run, plan;
    uint32_t epoch, round, lane;
    uint32_t world, self;
    uint64_t chunk_bytes;
    const uint64_t* lengths;   // world
    const uint32_t* links;     // world
    const uint32_t* sources;   // world: member from which each payload arrives; UINT32_MAX: none
    const uint8_t* receivers;  // world: 1 for members that get the own payload from here
    const uint8_t* near;       // world: 1 for members to which other sites' payloads are relayed
    const uint8_t* in;
    uint8_t* out;
    double allowed;
};

struct zb_traffic {
    uint64_t sent_bytes, to_send_bytes, received_bytes, to_receive_bytes, missing_part_bytes;
    double sending_s, silent_s;  // silent_s: since the last receipt; negative: none yet
};

struct zb_link {
    uint32_t is_up, streams, rtt_us, unanswered_ms, window, silent_ms, stalest_ms;
    uint64_t received_bytes, sent_packets, resent_packets;
};

// Whether all frames consist of whole codec blocks.
static bool is_aligned(const ReduceSpec& spec) {
    const size_t block = block_of(spec.codec);
    bool is_whole = spec.chunk_numel % block == 0;
    for (uint32_t shard = 0; shard < spec.world(); ++shard)
        is_whole = is_whole && (spec.bounds[shard] % block == 0 || spec.bounds[shard] == spec.bounds[shard + 1]);
    return is_whole;
}

static const char* problem_of_arrays(const zb_spec& spec) {
    if (spec.world < 2 || spec.world > MOST_MEMBERS || spec.speakers > spec.world) return "a reduction has 2 to 65536 members";
    if (!is_codec(spec.codec)) return "there is no such codec";
    if (spec.lane > UINT16_MAX) return "there are 65536 lanes at most";
    if (!is_rule(spec.rule, spec.trim)) return "there is no such robust rule";
    if (spec.rule != PLAIN && (spec.is_ring || spec.measured == nullptr)) return "a robust rule takes all contributions, and room for measures";
    if (!(spec.bounds && spec.shares && spec.order && spec.links && spec.next)) return "a list is missing";
    for (uint32_t member = 0; spec.rule != PLAIN && member < spec.world; ++member)
        if (spec.next[member] != member) return "a robust rule takes no sums of sites";
    return nullptr;
}

static const char* problem_of_buffers(const zb_spec& spec, const ReduceSpec& made) {
    if (made.numel() > 0 && ((spec.in == nullptr && spec.encoded == nullptr) || spec.out == nullptr)) return "a buffer is missing";
    const bool is_encoded = spec.encoded != nullptr || spec.encoded_out != nullptr;
    return is_encoded && !is_aligned(made) ? "the frames of an encoding must hold whole blocks" : nullptr;
}

static const char* problem_of_gather_arrays(const zb_gather_spec& spec) {
    if (spec.world < 2 || spec.world > MOST_MEMBERS) return "a gathering has 2 to 65536 members";
    if (spec.lane > UINT16_MAX) return "there are 65536 lanes at most";
    const bool has_lists = spec.lengths && spec.links && spec.sources && spec.receivers && spec.near;
    return has_lists ? nullptr : "a list is missing";
}

static const char* problem_of_gather_buffers(const zb_gather_spec& spec, const GatherSpec& made) {
    if (made.lengths[made.self] > 0 && spec.in == nullptr) return "a buffer is missing";
    for (uint32_t sender = 0; sender < made.world(); ++sender)
        if (made.lengths[sender] > 0 && made.sources[sender] != NOBODY && spec.out == nullptr) return "a buffer is missing";
    return nullptr;
}

int zb_abi() { return 17; }
// Problem of this thread's last failed call.
const char* zb_problem() { return problem.c_str(); }

int zb_variants() { return variant_count(); }
const char* zb_variant_name(int variant) {
    return variant < 0 || variant >= variant_count() ? nullptr : variant_name(variant);
}

int64_t zb_encoded_size(int codec, uint64_t n) {
    return is_codec(codec) && n <= MOST_NUMEL ? static_cast<int64_t>(encoded_size(static_cast<CodecId>(codec), n)) : -1;
}
// Index of the first non-finite value; -1: none.
int64_t zb_encode(int codec, int variant, const float* x, uint64_t n, uint8_t* out) {
    if (refuses(problem_of_values(codec, variant, n, x, out))) return INVALID;
    return variant_of(codec, variant).encode(x, n, out);
}
int zb_decode(int codec, int variant, const uint8_t* in, uint64_t n, float* x) {
    if (refuses(problem_of_values(codec, variant, n, in, x))) return INVALID;
    variant_of(codec, variant).decode(in, n, x);
    return 0;
}
int zb_add(int codec, int variant, const uint8_t* in, uint64_t n, float weight, float* sum) {
    if (refuses(problem_of_values(codec, variant, n, in, sum))) return INVALID;
    if (!(weight >= 0 && weight <= std::numeric_limits<float>::max()) && refuses("a weight must be finite and not negative"))
        return INVALID;
    variant_of(codec, variant).add(in, n, weight, sum);
    return 0;
}
int zb_largest(int codec, int variant, const uint8_t* in, uint64_t n, float* found) {
    if (refuses(problem_of_values(codec, variant, n, in, found)) || found == nullptr) return INVALID;
    *found = variant_of(codec, variant).largest(in, n);
    return 0;
}

// Combines `count` contributions of n values each, like a shard's owner. `measured`: 2 * count + 1 zeros, then as in
// zb_spec. Returns 0, or another number for invalid arguments.
int zb_combine(int codec, int variant, int rule, double trim, uint32_t iterations, uint32_t count,
               const uint8_t* const* parts, const float* shares, uint64_t n, float* out, double* measured) {
    if (!is_codec(codec) || variant >= variant_count() || !is_rule(rule, trim)) return 1;
    std::vector<Contribution> contributions;
    for (uint32_t member = 0; member < count; ++member)
        if (shares[member] > 0) contributions.push_back({member, shares[member], parts[member]});
    combine(robust_of(rule, trim, iterations), static_cast<CodecId>(codec), variant, contributions, n, out,
            {measured, measured + count, measured + 2 * count});
    return 0;
}

// `key`: as long as `data`, rounded up to stripes of 64 bytes.
uint64_t zb_hash(int variant, const uint8_t* data, uint64_t bytes, const uint32_t* key) {
    return robust_kernels_of(variant < 0 || variant >= variant_count() ? variant_count() - 1 : variant).hash(data, bytes, key);
}

// See outer.h. Return 0 or INVALID. `largest`: receives the result of `difference`.
int zb_difference(int variant, int threads, const float* outer, const float* inner, uint64_t n, float* out, float* largest) {
    if (refuses(problem_of_pass(variant, threads, n, outer, inner, out)) || largest == nullptr) return INVALID;
    *largest = n == 0 ? 0.0f : difference(variant, threads, outer, inner, n, out);
    return 0;
}
int zb_outer_sgd(int variant, int threads, float* params, float* momentum, const float* delta, uint64_t n, float lr,
                 float factor, int is_nesterov) {
    if (refuses(problem_of_pass(variant, threads, n, params, momentum, delta))) return INVALID;
    if (!(std::isfinite(lr) && std::isfinite(factor)) && refuses("a learning rate and a momentum must be finite")) return INVALID;
    if (n > 0) take_step(variant, threads, params, momentum, delta, n, {lr, factor, is_nesterov != 0});
    return 0;
}
int zb_copy(int variant, int threads, const float* from, uint64_t n, float* to) {
    if (refuses(problem_of_pass(variant, threads, n, from, to, to))) return INVALID;
    if (n > 0) copy(variant, threads, from, n, to);
    return 0;
}

const char* zb_sealing_problem() { return sealing_problem(); }

Engine* zb_engine_open(int threads, double beat_s) {
    if (threads > MOST_THREADS && refuses("an engine has 1024 threads at most")) return nullptr;
    if (!(beat_s > 0 && beat_s <= LONGEST_S) && refuses("a beat comes after more than 0 s and 10^6 s at most")) return nullptr;
    return guarded([&] { return new Engine(threads < 1 ? 1 : threads, beat_s); });
}
// Afterwards every link is down and nothing runs; the engine must be freed separately, after its operations.
void zb_engine_close(Engine* engine) { engine->close(); }
void zb_engine_free(Engine* engine) { delete engine; }

void zb_stream_add(Engine* engine, uint32_t link, int fd, const uint8_t* seal_key, const uint8_t* open_key) {
    engine->add_stream(link, fd, seal_key, open_key);
}
void zb_link_drop(Engine* engine, uint32_t link) { engine->drop_link(link); }
void zb_link_state(Engine* engine, uint32_t link, zb_link* out) {
    const LinkState state = engine->link_state(link);
    *out = {state.is_up ? 1u : 0u, state.streams,    state.rtt_us,         state.unanswered_ms, state.window,
            state.silent_ms,       state.stalest_ms, state.received_bytes, state.sent_packets,  state.resent_packets};
}

void zb_link_congestion(Engine* engine, uint32_t link, const char* name) {
    if (name != nullptr) engine->set_congestion(link, name);
}
void zb_link_pace(Engine* engine, uint32_t link, uint64_t bytes_per_s) { engine->set_pace(link, bytes_per_s); }
void zb_link_senders(Engine* engine, uint32_t link, uint32_t senders) { engine->set_senders(link, senders); }

uint64_t zb_peak_bytes(Engine* engine) { return engine->pool().peak_bytes(); }
void zb_forget_peak(Engine* engine) { engine->pool().forget_peak(); }

RunningPtr* zb_reduce_start(Engine* engine, const zb_spec* spec) {
    if (refuses(problem_of_arrays(*spec))) return nullptr;
    return guarded([&]() -> RunningPtr* {
        ReduceSpec made;
        made.operation = {spec->run, spec->plan, spec->epoch, spec->round, static_cast<uint16_t>(spec->lane)};
        made.codec = static_cast<CodecId>(spec->codec);
        made.is_ring = spec->is_ring != 0;
        made.self = spec->self;
        made.bounds.assign(spec->bounds, spec->bounds + spec->world + 1);
        made.shares.assign(spec->shares, spec->shares + spec->world);
        made.order.assign(spec->order, spec->order + spec->speakers);
        made.next.assign(spec->next, spec->next + spec->world);
        if (spec->largest != nullptr) made.largest.assign(spec->largest, spec->largest + spec->world);
        made.chunk_numel = spec->chunk_numel;
        made.in = spec->in;
        made.out = spec->out;
        made.encoded = spec->encoded;
        made.encoded_out = spec->encoded_out;
        made.allowed = spec->allowed;
        made.robust = robust_of(spec->rule, spec->trim, spec->iterations);
        if (spec->rule != PLAIN) made.measured = {spec->measured, spec->measured + spec->world, spec->measured + 2 * spec->world};
        if (refuses(problem_of(made)) || refuses(problem_of_buffers(*spec, made))) return nullptr;
        if (spec->hash_key != nullptr && spec->hashes != nullptr) made.hash_key = spec->hash_key, made.hashes = spec->hashes;
        made.error = spec->shares[spec->self] > 0 ? spec->error : nullptr;
        return new RunningPtr(engine->start(std::move(made), {spec->links, spec->links + spec->world}));
    });
}

RunningPtr* zb_gather_start(Engine* engine, const zb_gather_spec* spec) {
    if (refuses(problem_of_gather_arrays(*spec))) return nullptr;
    return guarded([&]() -> RunningPtr* {
        GatherSpec made;
        made.operation = {spec->run, spec->plan, spec->epoch, spec->round, static_cast<uint16_t>(spec->lane)};
        made.self = spec->self;
        made.lengths.assign(spec->lengths, spec->lengths + spec->world);
        made.sources.assign(spec->sources, spec->sources + spec->world);
        made.receivers.assign(spec->receivers, spec->receivers + spec->world);
        made.near.assign(spec->near, spec->near + spec->world);
        made.chunk_bytes = spec->chunk_bytes;
        made.in = spec->in;
        made.out = spec->out;
        made.allowed = spec->allowed;
        if (refuses(problem_of(made)) || refuses(problem_of_gather_buffers(*spec, made))) return nullptr;
        return new RunningPtr(engine->start(std::move(made), {spec->links, spec->links + spec->world}));
    });
}

// Waits at most this long; returns the TransferState.
int zb_transfer_wait(RunningPtr* running, double seconds) {
    if (seconds > 0) (*running)->transfer->wait(seconds < LONGEST_S ? seconds : LONGEST_S);
    return (*running)->transfer->state();
}
void zb_transfer_allow(Engine* engine, RunningPtr* running, double share) { engine->allow(*running, share); }
int zb_transfer_is_held(RunningPtr* running) { return (*running)->transfer->has_sent_what_is_allowed() ? 1 : 0; }
int64_t zb_transfer_detail(RunningPtr* running) { return (*running)->transfer->detail(); }

int zb_transfer_traffic(RunningPtr* running, uint32_t member, zb_traffic* out) {
    if (member >= (*running)->link_of.size() && refuses("there is no such member")) return INVALID;
    const Traffic traffic = (*running)->transfer->traffic(member);
    const double sending_s = traffic.last_sent_s - traffic.first_sent_s;
    const double silent_s = traffic.last_received_s > 0 ? monotonic_s() - traffic.last_received_s : -1;
    *out = {traffic.sent_bytes, traffic.to_send_bytes, traffic.received_bytes, traffic.to_receive_bytes,
            traffic.missing_part_bytes, sending_s > 0 ? sending_s : 0, silent_s};
    return 0;
}

// Stops it. Afterwards its buffers belong to the caller again; the handle must be freed separately.
void zb_transfer_end(Engine* engine, RunningPtr* running) { engine->finish(*running); }
void zb_transfer_free(RunningPtr* running) { delete running; }

}  // extern "C"
#pragma GCC visibility pop
