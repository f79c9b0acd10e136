// The C interface, as Python calls it through ctypes. No exception leaves it; null or a negative number is an error.

#include <new>
#include <utility>
#include <vector>

#include "codec.h"
#include "engine.h"
#include "seal.h"

using namespace zeroband;

namespace {

bool is_codec(int codec) { return codec >= 0 && codec < CODEC_COUNT; }

const Codec& variant_of(int codec, int variant) {
    const auto id = static_cast<CodecId>(codec);
    return variant < 0 ? codec_of(id) : codec_of(id, variant);
}

bool is_rule(int rule, double trim) { return rule >= PLAIN && rule < RULE_COUNT && trim >= 0 && trim < 0.5; }

Robust robust_of(int rule, double trim, uint32_t iterations) {
    return {static_cast<RobustRule>(rule), trim, iterations};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

struct zb_spec {
    uint64_t run, opening;
    uint32_t epoch, round, lane;
    int32_t codec, is_ring;
    uint32_t world, speakers, self;
    uint64_t chunk_numel;
    const uint64_t* bounds;  // world + 1
    const float* shares;     // world
    const uint32_t* order;   // `speakers`
    const uint32_t* links;   // world
    const uint32_t* next;    // world: of each member in its site's chain
    const float* in;
    float* out;
    float* error;  // may be null
    const uint8_t* encoded;  // may be null: of all values, in place of `in`
    uint8_t* encoded_out;    // may be null
    double allowed;
    int32_t rule;  // a RobustRule
    uint32_t iterations;
    double trim;
    double* measured;  // 2 * world + 1 where the rule is not PLAIN: dots, squares, those of the result
};

struct zb_gather_spec {
    uint64_t run, opening;
    uint32_t epoch, round, lane;
    uint32_t world, self;
    uint64_t chunk_bytes;
    const uint64_t* lengths;   // world
    const uint32_t* links;     // world
    const uint32_t* sources;   // world: who brings each member's payload here; its largest value: nobody
    const uint8_t* receivers;  // world: 1 for who gets the own payload from here
    const uint8_t* near;       // world: 1 for who gets from here what others than these send
    const uint8_t* in;
    uint8_t* out;
    double allowed;
};

struct zb_traffic {
    uint64_t sent_bytes, to_send_bytes, received_bytes, to_receive_bytes;
    double sending_s, silent_s;  // silent: since something arrived last; negative: nothing yet
};

struct zb_link {
    uint32_t is_up, streams, rtt_us, unanswered_ms, window, silent_ms, stalest_ms;
    uint64_t received_bytes, sent_packets, resent_packets;
};

// Whether every frame holds whole blocks of one encoding of all values.
static bool is_aligned(const zb_spec& spec) {
    const size_t block = block_of(static_cast<CodecId>(spec.codec));
    bool is_whole = spec.chunk_numel % block == 0;
    for (uint32_t shard = 0; shard < spec.world; ++shard) is_whole = is_whole && spec.bounds[shard] % block == 0;
    return is_whole;
}

int zb_abi() { return 14; }

int zb_variants() { return variant_count(); }
const char* zb_variant_name(int variant) {
    return variant < 0 || variant >= variant_count() ? nullptr : variant_name(variant);
}

int64_t zb_encoded_size(int codec, uint64_t n) {
    return is_codec(codec) ? static_cast<int64_t>(encoded_size(static_cast<CodecId>(codec), n)) : -1;
}
int64_t zb_encode(int codec, int variant, const float* x, uint64_t n, uint8_t* out) {
    return variant_of(codec, variant).encode(x, n, out);
}
void zb_decode(int codec, int variant, const uint8_t* in, uint64_t n, float* x) {
    variant_of(codec, variant).decode(in, n, x);
}
void zb_add(int codec, int variant, const uint8_t* in, uint64_t n, float weight, float* sum) {
    variant_of(codec, variant).add(in, n, weight, sum);
}

// What an owner makes of `count` contributions of n values each. `measured`: 2 * count + 1 zeros, then as in zb_spec.
// Gives 0; another number where it asks for what there is not.
int zb_combine(int codec, int variant, int rule, double trim, uint32_t iterations, uint32_t count,
               const uint8_t* const* parts, const float* shares, uint64_t n, float* out, double* measured) {
    if (!is_codec(codec) || variant >= variant_count() || !is_rule(rule, trim)) return 1;
    std::vector<Contribution> contributions;
    for (uint32_t member = 0; member < count; ++member)
        if (shares[member] > 0) contributions.push_back({member, shares[member], parts[member]});
    combine(robust_of(rule, trim, iterations), static_cast<CodecId>(codec), variant, std::move(contributions), n, out,
            {measured, measured + count, measured + 2 * count});
    return 0;
}

const char* zb_sealing_problem() { return sealing_problem(); }

Engine* zb_engine_open(int threads, double beat_s) { return new (std::nothrow) Engine(threads < 1 ? 1 : threads, beat_s); }
// Afterwards every link is down and nothing runs; the engine stays until it is freed, after its operations.
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

void zb_link_congestion(Engine* engine, uint32_t link, const char* name) { engine->set_congestion(link, name); }
void zb_link_pace(Engine* engine, uint32_t link, uint64_t bytes_per_s) { engine->set_pace(link, bytes_per_s); }
void zb_link_senders(Engine* engine, uint32_t link, uint32_t senders) { engine->set_senders(link, senders); }

uint64_t zb_peak_bytes(Engine* engine) { return engine->pool().peak_bytes(); }
void zb_forget_peak(Engine* engine) { engine->pool().forget_peak(); }

RunningPtr* zb_reduce_start(Engine* engine, const zb_spec* spec) {
    if (!is_codec(spec->codec) || spec->world < 2 || spec->self >= spec->world || spec->chunk_numel == 0) return nullptr;
    if (encoded_size(static_cast<CodecId>(spec->codec), spec->chunk_numel) > LARGEST_PAYLOAD) return nullptr;
    if (!is_rule(spec->rule, spec->trim) || (spec->rule != PLAIN && (spec->is_ring || spec->measured == nullptr))) return nullptr;
    if ((spec->encoded != nullptr || spec->encoded_out != nullptr) && !is_aligned(*spec)) return nullptr;
    ReduceSpec made;
    made.operation = {spec->run, spec->opening, spec->epoch, spec->round, static_cast<uint16_t>(spec->lane)};
    made.codec = static_cast<CodecId>(spec->codec);
    made.is_ring = spec->is_ring != 0;
    made.self = spec->self;
    made.bounds.assign(spec->bounds, spec->bounds + spec->world + 1);
    made.shares.assign(spec->shares, spec->shares + spec->world);
    made.order.assign(spec->order, spec->order + spec->speakers);
    made.next.assign(spec->next, spec->next + spec->world);
    made.chunk_numel = spec->chunk_numel;
    made.in = spec->in;
    made.out = spec->out;
    made.error = spec->shares[spec->self] > 0 ? spec->error : nullptr;
    made.encoded = spec->encoded;
    made.encoded_out = spec->encoded_out;
    made.allowed = spec->allowed;
    made.robust = robust_of(spec->rule, spec->trim, spec->iterations);
    if (spec->rule != PLAIN) made.measured = {spec->measured, spec->measured + spec->world, spec->measured + 2 * spec->world};
    if (!has_chains(made)) return nullptr;
    for (uint32_t member = 0; spec->rule != PLAIN && member < spec->world; ++member)
        if (made.next[member] != member) return nullptr;  // at sites contributions are sums
    return new (std::nothrow) RunningPtr(engine->start(std::move(made), {spec->links, spec->links + spec->world}));
}

RunningPtr* zb_gather_start(Engine* engine, const zb_gather_spec* spec) {
    if (spec->world < 2 || spec->self >= spec->world) return nullptr;
    if (spec->chunk_bytes == 0 || spec->chunk_bytes > LARGEST_PAYLOAD) return nullptr;
    GatherSpec made;
    made.operation = {spec->run, spec->opening, spec->epoch, spec->round, static_cast<uint16_t>(spec->lane)};
    made.self = spec->self;
    made.lengths.assign(spec->lengths, spec->lengths + spec->world);
    made.sources.assign(spec->sources, spec->sources + spec->world);
    made.receivers.assign(spec->receivers, spec->receivers + spec->world);
    made.near.assign(spec->near, spec->near + spec->world);
    made.chunk_bytes = spec->chunk_bytes;
    made.in = spec->in;
    made.out = spec->out;
    made.allowed = spec->allowed;
    if (!has_routes(made)) return nullptr;
    return new (std::nothrow) RunningPtr(engine->start(std::move(made), {spec->links, spec->links + spec->world}));
}

// Waits for at most so long; gives the TransferState.
int zb_transfer_wait(RunningPtr* running, double seconds) {
    if (seconds > 0) (*running)->transfer->wait(seconds);
    return (*running)->transfer->state();
}
void zb_transfer_allow(Engine* engine, RunningPtr* running, double share) { engine->allow(*running, share); }
int zb_transfer_is_held(RunningPtr* running) { return (*running)->transfer->has_sent_what_is_allowed() ? 1 : 0; }
int64_t zb_transfer_detail(RunningPtr* running) { return (*running)->transfer->detail(); }

void zb_transfer_traffic(RunningPtr* running, uint32_t member, zb_traffic* out) {
    const Traffic traffic = (*running)->transfer->traffic(member);
    const double sending_s = traffic.last_sent_s - traffic.first_sent_s;
    const double silent_s = traffic.last_received_s > 0 ? monotonic_s() - traffic.last_received_s : -1;
    *out = {traffic.sent_bytes, traffic.to_send_bytes, traffic.received_bytes, traffic.to_receive_bytes,
            sending_s > 0 ? sending_s : 0, silent_s};
}

// Stops it where it still runs. Afterwards its buffers are the caller's again; the handle stays until it is freed.
void zb_transfer_end(Engine* engine, RunningPtr* running) { engine->finish(*running); }
void zb_transfer_free(RunningPtr* running) { delete running; }

}  // extern "C"
#pragma GCC visibility pop
