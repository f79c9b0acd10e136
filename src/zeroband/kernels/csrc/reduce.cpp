#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace zeroband {
namespace {

enum class Room { SUM, DECODED };

// Float32 scratch of the calling thread.
template <Room>
float* scratch(uint64_t n) {
    thread_local std::vector<float> room;
    if (room.size() < n) room.resize(n);
    return room.data();
}

constexpr float NOTHING = -0.0f;  // -0 + x == x for all x, including the sign of zeros

// Speaker of a member's site.
uint32_t speaker_of(const ReduceSpec& spec, uint32_t member) {
    while (spec.next_of(member) != member) member = spec.next_of(member);
    return member;
}

}  // namespace

namespace {

// Whether chains end at speakers and do not overlap, and only speakers own shards and are in the ring.
bool has_chains(const ReduceSpec& spec) {
    const uint32_t world = spec.world();
    std::vector<uint32_t> before(world, 0), in_ring(world, 0);
    for (const uint32_t member : spec.order) {
        if (member >= world) return false;
        ++in_ring[member];
    }
    for (uint32_t member = 0; member < world; ++member) {
        const uint32_t next = spec.next_of(member);
        if (next >= world) return false;
        const bool speaks = next == member, owns = spec.bounds[member] != spec.bounds[member + 1];
        if (!speaks && (owns || ++before[next] > 1)) return false;
        if (in_ring[member] != (speaks ? 1 : 0)) return false;
    }
    for (uint32_t member = 0; member < world; ++member) {
        uint32_t at = member, steps = 0;
        while (spec.next_of(at) != at && steps++ < world) at = spec.next_of(at);
        if (spec.next_of(at) != at) return false;  // a circle
    }
    return true;
}

bool are_sizes(const std::vector<float>& values, float most) {
    return std::all_of(values.begin(), values.end(), [most](float value) { return value >= 0 && value <= most; });
}

// Whether the scales alone prove that no value exceeds the limit: a cheap check before scanning all values.
bool have_small_scales(CodecId codec, const uint8_t* in, uint64_t n, float limit) {
    if (codec != INT8 && codec != INT4) return false;
    const float most_level = codec == INT8 ? 128.0f : 8.0f;
    for (uint64_t start = 0; start < n; start += block_of(codec), in += sizeof(float)) {
        float scale;
        std::memcpy(&scale, in, sizeof scale);
        if (!(std::fabs(scale) * most_level <= limit)) return false;
    }
    return true;
}

// Allows for rounding, which enlarges values: a bfloat16 by up to 1/512, a ring's partial sum once per member.
constexpr float SLACK = 2.0f;
constexpr float LARGEST_FLOAT = std::numeric_limits<float>::max();

}  // namespace

const char* problem_of(const ReduceSpec& spec) {
    const size_t world = spec.shares.size();
    const float any = std::numeric_limits<float>::infinity();
    if (world < 2 || world > MOST_MEMBERS) return "a reduction has 2 to 65536 members";
    if (spec.self >= world) return "this node is none of the members";
    if (spec.codec < 0 || spec.codec >= CODEC_COUNT) return "there is no such codec";
    if (spec.bounds.size() != world + 1 || spec.bounds[0] != 0) return "the bounds of the shards begin with 0";
    if (!std::is_sorted(spec.bounds.begin(), spec.bounds.end())) return "the bounds of the shards must ascend";
    if (spec.numel() > MOST_NUMEL) return "a reduction has 2^40 values at most";
    if (spec.chunk_numel == 0 || spec.chunk_numel > LARGEST_PAYLOAD ||
        encoded_size(spec.codec, spec.chunk_numel) > LARGEST_PAYLOAD || encoded_size(FP32, spec.chunk_numel) > LARGEST_PAYLOAD)
        return "a frame holds 1 value to 16 MiB";
    const uint64_t chunks = spec.numel() / spec.chunk_numel + world;
    if (chunks > Reduce::MOST_CHUNKS || chunks * (1 + world) > Reduce::MOST_FRAMES) return "the frames are too many";
    if (!are_sizes(spec.shares, LARGEST_FLOAT)) return "shares must be finite and not negative";
    if (!spec.largest.empty() && (spec.largest.size() != world || !are_sizes(spec.largest, any)))
        return "the largest sizes of the members' values must not be negative";
    if (!spec.next.empty() && spec.next.size() != world) return "each member has one next in its site's chain";
    if (!has_chains(spec)) return "the chains of the sites, their shards and the ring do not fit together";
    if (spec.is_ring && spec.order.size() < 2) return "a ring has at least 2 members";
    if (!(spec.allowed >= 0)) return "the share of the frames to be sent must not be negative";
    return nullptr;
}

Reduce::Reduce(ReduceSpec spec, std::shared_ptr<PacketPool> pool)
    : Transfer(spec.operation, spec.self, spec.world(), std::move(pool)),
      spec_(std::move(spec)),
      codec_(codec_of(spec_.codec)),
      site_shares_(spec_.world(), 0.0f),
      behind_(spec_.world()) {
    const uint32_t world = spec_.world();
    for (uint32_t member = 0; member < world; ++member) {
        site_shares_[speaker_of(spec_, member)] += spec_.shares[member];
        if (member != spec_.self && spec_.next_of(member) == spec_.self) behind_ = member;
    }
    site_share_ = site_shares_[speaker_of(spec_, spec_.self)];
    for (uint32_t member = 0; member < world; ++member) {  // members whose path to the speaker passes this one
        uint32_t at = member;
        while (at != spec_.self && spec_.next_of(at) != at) at = spec_.next_of(at);
        if (at == spec_.self && member != spec_.self) share_behind_ += spec_.shares[member];
    }
    first_chunk_.push_back(0);
    for (uint32_t shard = 0; shard < world; ++shard) {
        const uint64_t size = spec_.bounds[shard + 1] - spec_.bounds[shard];
        first_chunk_.push_back(first_chunk_.back() + (size + spec_.chunk_numel - 1) / spec_.chunk_numel);
    }
    next_partial_.assign(world, 0);
    summed_.resize(world);
    if (spec_.is_ring && sums_site()) {
        is_summed_.assign(first_chunk_.back(), false);
        held_.resize(first_chunk_.back());
    }
    if (!spec_.is_ring) {
        uint32_t contributors = sums_site() ? 1 : 0;
        for (uint32_t member = 0; member < world; ++member) contributors += member != spec_.self && site_shares_[member] > 0;
        parts_.assign(chunks_of(spec_.self), std::vector<PacketPtr>(world));
        missing_.assign(chunks_of(spec_.self), contributors);
    }
    limit_values();
    count_traffic();
    counted(first_chunk_.back(), (1 + world) * first_chunk_.back(), spec_.allowed);
}

// Derives limits of received values from the members' announced ones: a mean is no larger than the largest of them.
void Reduce::limit_values() {
    const uint32_t world = spec_.world();
    part_limits_.assign(world, spec_.largest.empty() ? LARGEST_FLOAT : 0.0f);
    limit_ = LARGEST_FLOAT;
    if (spec_.largest.empty()) return;
    double all = 0, shares = 0;
    for (uint32_t member = 0; member < world; ++member) {
        if (spec_.shares[member] == 0) continue;
        float& part = part_limits_[speaker_of(spec_, member)];
        part = std::max(part, std::min(SLACK * spec_.largest[member], LARGEST_FLOAT));
        all = std::max(all, static_cast<double>(spec_.largest[member]));
        shares += spec_.shares[member];
    }
    for (uint32_t member = 0; member < world; ++member) part_limits_[member] = part_limits_[speaker_of(spec_, member)];
    limit_ = static_cast<float>(std::min(SLACK * all * std::max(1.0, shares), static_cast<double>(LARGEST_FLOAT)));
}

// Relays refuse an excessive mean before they pass it on, so the direct sender is always at fault.
bool Reduce::is_within_limits(uint32_t peer, const PacketPtr& packet) const {
    const Frame& frame = packet->frame;
    const bool is_part = frame.kind == PARTIAL && (peer == behind_ || !spec_.is_ring);
    if (is_part && spec_.robust.rule != PLAIN) return true;  // the rule bounds parts and drops non-finite ones
    const auto codec = static_cast<CodecId>(frame.codec);
    const uint64_t n = chunk_size(frame.shard, frame.chunk);
    const float limit = is_part ? part_limits_[peer] : limit_;
    return have_small_scales(codec, packet->payload(), n, limit) || codec_of(codec).largest(packet->payload(), n) <= limit;
}

uint64_t Reduce::chunk_start(uint32_t shard, uint32_t chunk) const {
    return spec_.bounds[shard] + chunk * spec_.chunk_numel;
}

uint64_t Reduce::chunk_size(uint32_t shard, uint32_t chunk) const {
    const uint64_t left = spec_.bounds[shard + 1] - chunk_start(shard, chunk);
    return left < spec_.chunk_numel ? left : spec_.chunk_numel;
}

Frame Reduce::frame_of(FrameKind kind, uint32_t shard, uint32_t chunk) const {
    const size_t bytes = encoded_size(spec_.codec, chunk_size(shard, chunk));
    return {spec_.operation, kind, static_cast<uint8_t>(spec_.codec), shard, chunk, static_cast<uint32_t>(bytes)};
}

Frame Reduce::chain_frame(uint32_t shard, uint32_t chunk) const {
    const size_t bytes = encoded_size(FP32, chunk_size(shard, chunk));
    return {spec_.operation, PARTIAL, static_cast<uint8_t>(FP32), shard, chunk, static_cast<uint32_t>(bytes)};
}

// The member `step` places further in the ring. Speakers only.
uint32_t Reduce::ring_neighbour(uint32_t step) const {
    uint32_t at = 0;
    while (spec_.order[at] != spec_.self) ++at;
    return spec_.order[(at + step) % spec_.order.size()];
}

void Reduce::count_traffic() {
    const uint32_t world = spec_.world(), self = spec_.self;
    const auto add = [&](uint32_t peer, uint32_t shard, bool sends, FrameKind kind = FINAL) {
        for (uint32_t chunk = 0; chunk < chunks_of(shard); ++chunk)
            count(peer, frame_of(kind, shard, chunk).payload_bytes, sends, kind == PARTIAL);
    };
    const auto add_chain = [&](uint32_t peer, bool sends) {
        for (uint32_t shard = 0; shard < world; ++shard)
            for (uint32_t chunk = 0; chunk < chunks_of(shard); ++chunk)
                count(peer, chain_frame(shard, chunk).payload_bytes, sends, true);
    };
    if (behind_ < world) {
        if (share_behind_ > 0) add_chain(behind_, false);
        for (uint32_t shard = 0; shard < world; ++shard) add(behind_, shard, true);
    }
    if (!is_speaker()) {
        const uint32_t next = spec_.next_of(self);
        if (share_behind_ + spec_.shares[self] > 0) add_chain(next, true);
        for (uint32_t shard = 0; shard < world; ++shard) add(next, shard, false);
        return;
    }
    if (spec_.is_ring) {
        const uint32_t after = ring_neighbour(1), before = ring_neighbour(static_cast<uint32_t>(spec_.order.size()) - 1);
        for (uint32_t shard = 0; shard < world; ++shard) {
            if (shard != self) add(after, shard, true);     // its partial sum
            if (shard != after) add(after, shard, true);    // its mean
            if (shard != before) add(before, shard, false, PARTIAL);
            if (shard != self) add(before, shard, false);
        }
        return;
    }
    for (uint32_t peer = 0; peer < world; ++peer) {
        if (peer == self || spec_.next_of(peer) != peer) continue;
        if (site_share_ > 0) add(peer, peer, true);
        if (site_shares_[peer] > 0) add(peer, self, false, PARTIAL);
        add(peer, self, true);
        add(peer, peer, false);
    }
}

void Reduce::begin() {
    Busy busy(*this);
    std::vector<uint32_t> awakened;
    if (busy && !is_speaker() && spec_.error != nullptr)  // float32 in the chain: no encoding error
        std::fill(spec_.error, spec_.error + spec_.numel(), 0.0f);
    for (uint32_t chunk = 0; busy && chunk < missing_.size(); ++chunk)
        if (missing_[chunk] == 0) finish(chunk, parts_[chunk], awakened);
    settle(0, 0);
}

bool Reduce::claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) {
    if (!is_speaker()) {
        if (peer != spec_.next_of(spec_.self) || share_behind_ > 0 || spec_.shares[spec_.self] == 0) return false;
        shard = spec_.world();  // round-robin over shards, so that all owners have work early
        for (uint32_t other = 0; other < spec_.world(); ++other) {
            const bool has_more = next_partial_[other] < chunks_of(other);
            if (has_more && (shard == spec_.world() || next_partial_[other] < next_partial_[shard])) shard = other;
        }
        if (shard == spec_.world()) return false;
    } else {
        if (spec_.is_ring ? peer != ring_neighbour(1) : site_share_ == 0) return false;
        shard = spec_.is_ring ? ring_neighbour(static_cast<uint32_t>(spec_.order.size()) - 1) : peer;
    }
    if (sums_site()) {
        if (summed_[shard].empty()) return false;
        chunk = summed_[shard].front();
        summed_[shard].pop_front();
        return true;
    }
    if (next_partial_[shard] >= chunks_of(shard)) return false;
    chunk = next_partial_[shard]++;
    return true;
}

PacketPtr Reduce::make(uint32_t shard, uint32_t chunk) {
    if (!is_speaker()) return chain_part(shard, chunk);
    if (!spec_.is_ring) return own_part(shard, chunk);
    const uint64_t start = chunk_start(shard, chunk), n = chunk_size(shard, chunk);
    float* sum = scratch<Room::SUM>(n);  // partial sums of shares travel
    std::fill(sum, sum + n, site_share_ > 0 ? NOTHING : 0.0f);
    add_site(shard, chunk, sum);
    PacketPtr packet = pool_->lend(frame_of(PARTIAL, shard, chunk));
    if (!encode(sum, packet, n, static_cast<int64_t>(start))) return nullptr;
    note_error(sum, packet, n, start, spec_.shares[spec_.self]);
    return packet;
}

// The end of the chain: starts the site's sum.
PacketPtr Reduce::chain_part(uint32_t shard, uint32_t chunk) {
    const uint64_t n = chunk_size(shard, chunk);
    float* mean = scratch<Room::SUM>(n);
    std::fill(mean, mean + n, NOTHING);
    add_own(shard, chunk, spec_.shares[spec_.self] / site_share_, mean);
    PacketPtr packet = pool_->lend(chain_frame(shard, chunk));
    const int64_t bad = codec_of(FP32).encode(mean, n, packet->payload());
    if (bad >= 0) fail(NOT_FINITE, static_cast<int64_t>(chunk_start(shard, chunk)) + bad);
    return bad >= 0 ? nullptr : packet;
}

// A site's partial sum from behind: adds this member's part and passes it on.
void Reduce::add_to_chain(PacketPtr packet, std::vector<uint32_t>& awakened) {
    const uint32_t shard = packet->frame.shard, chunk = packet->frame.chunk;
    const uint64_t n = chunk_size(shard, chunk), start = chunk_start(shard, chunk);
    float* mean = is_speaker() ? spec_.out + start : scratch<Room::SUM>(n);
    codec_of(FP32).decode(packet->payload(), n, mean);
    add_own(shard, chunk, spec_.shares[spec_.self] / site_share_, mean);
    if (is_speaker()) return use_site_mean(shard, chunk, awakened);
    const int64_t bad = codec_of(FP32).encode(mean, n, packet->payload());
    if (bad >= 0) return fail(NOT_FINITE, static_cast<int64_t>(start) + bad);
    enqueue(spec_.next_of(spec_.self), packet, awakened);
}

// At the speaker: the site's contribution to a chunk is complete.
void Reduce::use_site_mean(uint32_t shard, uint32_t chunk, std::vector<uint32_t>& awakened) {
    if (!spec_.is_ring && shard == spec_.self) return count_down(chunk, awakened);
    PacketPtr held;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t number = first_chunk_[shard] + chunk;
        const uint32_t last = spec_.is_ring ? ring_neighbour(static_cast<uint32_t>(spec_.order.size()) - 1) : shard;
        if (shard == last) {
            summed_[shard].push_back(chunk);
            awakened.push_back(spec_.is_ring ? ring_neighbour(1) : shard);
            return;
        }
        is_summed_[number] = true;
        held = std::move(held_[number]);
    }
    if (held != nullptr) pass_on(std::move(held), awakened);
}

// Encodes this site's contribution to a chunk.
PacketPtr Reduce::own_part(uint32_t shard, uint32_t chunk) {
    const uint64_t start = chunk_start(shard, chunk), n = chunk_size(shard, chunk);
    PacketPtr packet = pool_->lend(frame_of(PARTIAL, shard, chunk));
    if (encoding() != nullptr) {
        take_part(spec_.codec, encoding(), spec_.numel(), start, n, packet->payload());
        if (spec_.error != nullptr) std::fill(spec_.error + start, spec_.error + start + n, 0.0f);
        return packet;
    }
    if (!encode(contribution() + start, packet, n, static_cast<int64_t>(start))) return nullptr;
    note_error(contribution() + start, packet, n, start, spec_.shares[spec_.self] / site_share_);
    return packet;
}

// Adds this member's values of a chunk times a share to a sum.
void Reduce::add_own(uint32_t shard, uint32_t chunk, float share, float* sum) {
    if (share == 0) return;  // the buffer may hold anything, even NaN
    const uint64_t n = chunk_size(shard, chunk);
    if (spec_.encoded != nullptr) {
        const PacketPtr part = pool_->lend(frame_of(PARTIAL, shard, chunk));
        take_part(spec_.codec, spec_.encoded, spec_.numel(), chunk_start(shard, chunk), n, part->payload());
        return codec_.add(part->payload(), n, share, sum);
    }
    const float* values = spec_.in + chunk_start(shard, chunk);
    for (uint64_t i = 0; i < n; ++i) sum[i] += share * values[i];
}

// Adds the site's share of a chunk to a sum.
void Reduce::add_site(uint32_t shard, uint32_t chunk, float* sum) {
    if (!sums_site()) return add_own(shard, chunk, site_share_, sum);
    const float* mean = spec_.out + chunk_start(shard, chunk);
    const uint64_t n = chunk_size(shard, chunk);
    for (uint64_t i = 0; i < n; ++i) sum[i] += site_share_ * mean[i];
}

// Records the encoding error of values that contain this member's, times `share`.
void Reduce::note_error(const float* values, const PacketPtr& packet, uint64_t n, uint64_t start, float share) {
    if (spec_.error == nullptr) return;
    float* decoded = scratch<Room::DECODED>(n);
    codec_.decode(packet->payload(), n, decoded);
    for (uint64_t i = 0; i < n; ++i) spec_.error[start + i] = (values[i] - decoded[i]) / share;
}

bool Reduce::encode(const float* values, const PacketPtr& packet, uint64_t n, int64_t start) {
    const int64_t bad = codec_.encode(values, n, packet->payload());
    if (bad < 0) return true;
    fail(NOT_FINITE, start + bad);
    return false;
}

bool Reduce::expects(uint32_t peer, const Frame& frame) const {
    const uint32_t world = spec_.world(), self = spec_.self;
    if (frame.kind != PARTIAL && frame.kind != FINAL) return false;
    if (peer == self || peer >= world || frame.shard >= world || frame.chunk >= chunks_of(frame.shard)) return false;
    if (peer == behind_ && frame.kind == PARTIAL) {
        const Frame wanted = chain_frame(frame.shard, frame.chunk);
        return share_behind_ > 0 && frame.codec == wanted.codec && frame.payload_bytes == wanted.payload_bytes;
    }
    if (frame.codec != spec_.codec) return false;
    if (frame.payload_bytes != frame_of(frame.kind, frame.shard, frame.chunk).payload_bytes) return false;
    if (!is_speaker()) return frame.kind == FINAL && peer == spec_.next_of(self);
    if (spec_.is_ring) {
        const uint32_t before = ring_neighbour(static_cast<uint32_t>(spec_.order.size()) - 1);
        return peer == before && frame.shard != (frame.kind == PARTIAL ? before : self);
    }
    return frame.kind == PARTIAL ? frame.shard == self && site_shares_[peer] > 0 : frame.shard == peer;
}

uint64_t Reduce::number_of(uint32_t peer, const Frame& frame) const {
    const uint64_t sender = frame.kind == FINAL ? 0 : 1 + peer;
    return sender * first_chunk_.back() + first_chunk_[frame.shard] + frame.chunk;
}

void Reduce::take(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) {
    if (!is_within_limits(peer, packet)) return fail(OUT_OF_RANGE, peer);
    if (packet->frame.kind == FINAL)
        adopt(packet, awakened);
    else if (peer == behind_)
        add_to_chain(std::move(packet), awakened);
    else if (spec_.is_ring)
        pass_on(std::move(packet), awakened);
    else
        collect(peer, std::move(packet), awakened);
}

// Lets the owner check later, in an audit, that a member shows what it sent.
void Reduce::hash_part(uint32_t peer, const PacketPtr& packet) {
    thread_local std::vector<uint8_t> part;
    part.resize(encoded_size(spec_.codec, PIECE));
    const uint32_t chunk = packet->frame.chunk;
    const uint64_t n = chunk_size(spec_.self, chunk);
    uint64_t* hash = spec_.hashes + peer * spec_.hashes_of_member() + chunk * spec_.pieces_of_chunk();
    for (uint64_t start = 0; start < n; start += PIECE, ++hash) {
        const uint64_t size = std::min<uint64_t>(PIECE, n - start);
        take_part(spec_.codec, packet->payload(), n, start, size, part.data());
        *hash = robust_kernels_of(variant_count() - 1).hash(part.data(), encoded_size(spec_.codec, size), spec_.hash_key);
    }
}

// All-to-all: receives a part of an own chunk.
void Reduce::collect(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) {
    const uint32_t chunk = packet->frame.chunk;
    if (spec_.hashes != nullptr) hash_part(peer, packet);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        parts_[chunk][peer] = std::move(packet);
    }
    count_down(chunk, awakened);
}

// All-to-all: counts a received part; the last one finishes the chunk.
void Reduce::count_down(uint32_t chunk, std::vector<uint32_t>& awakened) {
    std::vector<PacketPtr> parts;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (--missing_[chunk] > 0) return;
        parts = std::move(parts_[chunk]);
        parts_[chunk].clear();
    }
    finish(chunk, parts, awakened);
}

void Reduce::finish(uint32_t chunk, const std::vector<PacketPtr>& parts, std::vector<uint32_t>& awakened) {
    const uint64_t n = chunk_size(spec_.self, chunk);
    float* sum = scratch<Room::SUM>(n);
    std::memset(sum, 0, n * sizeof(float));
    std::vector<PacketPtr> all = parts;
    for (uint32_t member = 0; member < spec_.world(); ++member) {
        if (site_shares_[member] == 0) continue;
        if (member == spec_.self && (all[member] = own_part(spec_.self, chunk)) == nullptr) return;
        if (spec_.robust.rule == PLAIN) codec_.add(all[member]->payload(), n, site_shares_[member], sum);
    }
    if (spec_.robust.rule != PLAIN) combine_robustly(all, n, sum);
    const int64_t bad = publish(chunk, sum, awakened);
    if (bad >= 0) blame(parts, n, bad);
}

// A mean cannot be encoded: blames the member with a non-finite part, or reports the value's index.
void Reduce::blame(const std::vector<PacketPtr>& parts, uint64_t n, int64_t bad) {
    float* values = scratch<Room::DECODED>(n);
    for (uint32_t member = 0; member < spec_.world(); ++member) {
        if (parts[member] == nullptr) continue;
        codec_.decode(parts[member]->payload(), n, values);
        for (uint64_t i = 0; i < n; ++i)
            if (!std::isfinite(values[i])) return fail(OUT_OF_RANGE, member);
    }
    fail(NOT_FINITE, bad);
}

// Combines the parts of a chunk, and adds their measurements to the caller's.
void Reduce::combine_robustly(const std::vector<PacketPtr>& parts, uint64_t n, float* result) {
    const uint32_t world = spec_.world();
    std::vector<Contribution> contributions;
    for (uint32_t member = 0; member < world; ++member)
        if (site_shares_[member] > 0) contributions.push_back({member, site_shares_[member], parts[member]->payload()});
    std::vector<double> seen(2 * world + 1, 0.0);
    combine(spec_.robust, spec_.codec, -1, contributions, n, result,
            {seen.data(), seen.data() + world, seen.data() + 2 * world});
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t member = 0; member < world; ++member) {
        spec_.measured.dots[member] += seen[member];
        spec_.measured.squares[member] += seen[world + member];
    }
    *spec_.measured.result += seen[2 * world];
}

// Writes to the caller's buffers.
void Reduce::write(const PacketPtr& packet) {
    const Frame& frame = packet->frame;
    const uint64_t n = chunk_size(frame.shard, frame.chunk), start = chunk_start(frame.shard, frame.chunk);
    const bool is_read_again = spec_.error != nullptr && frame.shard == spec_.self;
    (is_read_again ? codec_.decode : codec_.decode_away)(packet->payload(), n, spec_.out + start);
    if (spec_.encoded_out != nullptr)
        put_part(spec_.codec, packet->payload(), start, n, spec_.encoded_out, spec_.numel());
}

// Encodes the mean of an own chunk, adopts the decoded values and sends it on. Returns the index of a value that cannot
// be encoded, or -1.
int64_t Reduce::publish(uint32_t chunk, const float* mean, std::vector<uint32_t>& awakened) {
    const uint64_t n = chunk_size(spec_.self, chunk), start = chunk_start(spec_.self, chunk);
    PacketPtr packet = pool_->lend(frame_of(FINAL, spec_.self, chunk));
    const int64_t bad = codec_.encode(mean, n, packet->payload());
    if (bad >= 0) return static_cast<int64_t>(start) + bad;
    write(packet);
    const float share = spec_.shares[spec_.self];
    // Not with a robust rule, which would take this error in the owner's next contribution for a lie.
    const bool notes_error = spec_.error != nullptr && spec_.robust.rule == PLAIN;
    for (uint64_t i = 0; notes_error && i < n; ++i) {  // all-to-all: in addition to the own part's error
        const float taken = (mean[i] - spec_.out[start + i]) / share;
        spec_.error[start + i] = spec_.is_ring ? taken : spec_.error[start + i] + taken;
    }
    if (spec_.is_ring) {
        enqueue(ring_neighbour(1), packet, awakened);
    } else {
        for (uint32_t step = 1; step < spec_.world(); ++step) {
            const uint32_t peer = (spec_.self + step) % spec_.world();
            if (spec_.next_of(peer) == peer) enqueue(peer, packet, awakened);
        }
    }
    send_back(packet, awakened);
    settle(0, 1);
    return -1;
}

// Ring: adds to a partial sum and sends it on; at the owner it becomes the mean.
void Reduce::pass_on(PacketPtr packet, std::vector<uint32_t>& awakened) {
    const Frame& frame = packet->frame;
    const uint64_t n = chunk_size(frame.shard, frame.chunk), start = chunk_start(frame.shard, frame.chunk);
    if (sums_site()) {
        std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t number = first_chunk_[frame.shard] + frame.chunk;
        if (!is_summed_[number]) {
            held_[number] = std::move(packet);
            return;
        }
    }
    float* sum = scratch<Room::SUM>(n);
    codec_.decode(packet->payload(), n, sum);
    add_site(frame.shard, frame.chunk, sum);
    if (frame.shard == spec_.self) {
        const int64_t bad = publish(frame.chunk, sum, awakened);
        if (bad >= 0) fail(NOT_FINITE, bad);
        return;
    }
    if (site_share_ > 0) {
        if (!encode(sum, packet, n, static_cast<int64_t>(start))) return;
        note_error(sum, packet, n, start, spec_.shares[spec_.self]);
    }
    enqueue(ring_neighbour(1), packet, awakened);
}

// Decodes a mean and sends it on: down the chain, and around the ring up to the owner's predecessor.
void Reduce::adopt(const PacketPtr& packet, std::vector<uint32_t>& awakened) {
    const Frame& frame = packet->frame;
    write(packet);
    if (is_speaker() && spec_.is_ring && ring_neighbour(1) != frame.shard) enqueue(ring_neighbour(1), packet, awakened);
    send_back(packet, awakened);
    settle(0, 1);
}

// Down the chain.
void Reduce::send_back(const PacketPtr& packet, std::vector<uint32_t>& awakened) {
    if (behind_ < spec_.world()) enqueue(behind_, packet, awakened);
}

}  // namespace zeroband
