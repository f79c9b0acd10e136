#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeroband {
namespace {

enum class Room { SUM, DECODED };

// Float32 room of the calling thread.
template <Room>
float* scratch(uint64_t n) {
    thread_local std::vector<float> room;
    if (room.size() < n) room.resize(n);
    return room.data();
}

}  // namespace

Reduce::Reduce(ReduceSpec spec, std::shared_ptr<PacketPool> pool)
    : Transfer(spec.operation, spec.self, spec.world(), std::move(pool)),
      spec_(std::move(spec)),
      codec_(codec_of(spec_.codec)) {
    const uint32_t world = spec_.world();
    first_chunk_.push_back(0);
    for (uint32_t shard = 0; shard < world; ++shard) {
        const uint64_t size = spec_.bounds[shard + 1] - spec_.bounds[shard];
        first_chunk_.push_back(first_chunk_.back() + (size + spec_.chunk_numel - 1) / spec_.chunk_numel);
    }
    next_partial_.assign(world, 0);
    if (!spec_.is_ring) {
        uint32_t contributors = 0;
        for (uint32_t member = 0; member < world; ++member) contributors += member != spec_.self && spec_.shares[member] > 0;
        parts_.assign(chunks_of(spec_.self), std::vector<PacketPtr>(world));
        missing_.assign(chunks_of(spec_.self), contributors);
    }
    count_traffic();
    counted(first_chunk_.back(), (1 + world) * first_chunk_.back(), spec_.allowed);
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

// The member `step` places behind this one.
uint32_t Reduce::ring_neighbour(uint32_t step) const {
    uint32_t at = 0;
    while (spec_.order[at] != spec_.self) ++at;
    return spec_.order[(at + step) % spec_.world()];
}

void Reduce::count_traffic() {
    const uint32_t world = spec_.world(), self = spec_.self;
    const auto add = [&](uint32_t peer, uint32_t shard, bool sends) {
        for (uint32_t chunk = 0; chunk < chunks_of(shard); ++chunk)
            count(peer, frame_of(FINAL, shard, chunk).payload_bytes, sends);
    };
    if (spec_.is_ring) {
        const uint32_t after = ring_neighbour(1), before = ring_neighbour(world - 1);
        for (uint32_t shard = 0; shard < world; ++shard) {
            if (shard != self) add(after, shard, true);     // its partial sum
            if (shard != after) add(after, shard, true);    // its mean
            if (shard != before) add(before, shard, false);
            if (shard != self) add(before, shard, false);
        }
        return;
    }
    for (uint32_t peer = 0; peer < world; ++peer) {
        if (peer == self) continue;
        if (spec_.shares[self] > 0) add(peer, peer, true);
        if (spec_.shares[peer] > 0) add(peer, self, false);
        add(peer, self, true);
        add(peer, peer, false);
    }
}

void Reduce::begin() {
    Busy busy(*this);
    std::vector<uint32_t> awakened;
    for (uint32_t chunk = 0; busy && chunk < missing_.size(); ++chunk)
        if (missing_[chunk] == 0) finish(chunk, parts_[chunk], awakened);
    settle(0, 0);
}

bool Reduce::claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) {
    if (spec_.is_ring ? peer != ring_neighbour(1) : spec_.shares[spec_.self] == 0) return false;
    shard = spec_.is_ring ? ring_neighbour(spec_.world() - 1) : peer;
    if (next_partial_[shard] >= chunks_of(shard)) return false;
    chunk = next_partial_[shard]++;
    return true;
}

PacketPtr Reduce::make(uint32_t shard, uint32_t chunk) {
    if (!spec_.is_ring) return own_part(shard, chunk);
    const uint64_t start = chunk_start(shard, chunk), n = chunk_size(shard, chunk);
    float* sum = scratch<Room::SUM>(n);  // partial sums of shares travel
    std::fill(sum, sum + n, spec_.shares[spec_.self] > 0 ? -0.0f : 0.0f);  // what is added keeps its sign
    add_own(shard, chunk, sum);
    PacketPtr packet = pool_->lend(frame_of(PARTIAL, shard, chunk));
    if (!encode(sum, packet, n, static_cast<int64_t>(start))) return nullptr;
    note_error(sum, packet, n, start, spec_.shares[spec_.self]);
    return packet;
}

// This member's contribution to a chunk, encoded alone.
PacketPtr Reduce::own_part(uint32_t shard, uint32_t chunk) {
    const uint64_t start = chunk_start(shard, chunk), n = chunk_size(shard, chunk);
    PacketPtr packet = pool_->lend(frame_of(PARTIAL, shard, chunk));
    if (spec_.encoded != nullptr) {
        take_part(spec_.codec, spec_.encoded, spec_.numel(), start, n, packet->payload());
        if (spec_.error != nullptr) std::fill(spec_.error + start, spec_.error + start + n, 0.0f);
        return packet;
    }
    if (!encode(spec_.in + start, packet, n, static_cast<int64_t>(start))) return nullptr;
    note_error(spec_.in + start, packet, n, start, 1);
    return packet;
}

// Adds this member's share of a chunk to a sum.
void Reduce::add_own(uint32_t shard, uint32_t chunk, float* sum) {
    const float share = spec_.shares[spec_.self];
    if (share == 0) return;  // its contribution may be anything
    const uint64_t n = chunk_size(shard, chunk);
    if (spec_.encoded != nullptr) {
        const PacketPtr part = pool_->lend(frame_of(PARTIAL, shard, chunk));
        take_part(spec_.codec, spec_.encoded, spec_.numel(), chunk_start(shard, chunk), n, part->payload());
        return codec_.add(part->payload(), n, share, sum);
    }
    const float* values = spec_.in + chunk_start(shard, chunk);
    for (uint64_t i = 0; i < n; ++i) sum[i] += share * values[i];
}

// What the encoding of values that hold this member's own ones times `share` took from them.
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
    if (frame.codec != spec_.codec || peer == self || peer >= world || frame.shard >= world) return false;
    if (frame.chunk >= chunks_of(frame.shard)) return false;
    if (frame.payload_bytes != frame_of(frame.kind, frame.shard, frame.chunk).payload_bytes) return false;
    if (spec_.is_ring) {
        const uint32_t before = ring_neighbour(world - 1);
        return peer == before && frame.shard != (frame.kind == PARTIAL ? before : self);
    }
    return frame.kind == PARTIAL ? frame.shard == self && spec_.shares[peer] > 0 : frame.shard == peer;
}

uint64_t Reduce::number_of(uint32_t peer, const Frame& frame) const {
    const uint64_t sender = frame.kind == FINAL ? 0 : 1 + peer;
    return sender * first_chunk_.back() + first_chunk_[frame.shard] + frame.chunk;
}

void Reduce::take(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) {
    if (packet->frame.kind == FINAL)
        adopt(packet, awakened);
    else if (spec_.is_ring)
        pass_on(std::move(packet), awakened);
    else
        collect(peer, std::move(packet), awakened);
}

// All-to-all: a part of an own chunk; the last one has the chunk finished.
void Reduce::collect(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) {
    const uint32_t chunk = packet->frame.chunk;
    std::vector<PacketPtr> parts;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        parts_[chunk][peer] = std::move(packet);
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
    for (uint32_t member = 0; member < spec_.world(); ++member) {
        if (spec_.shares[member] == 0) continue;
        PacketPtr part = parts[member];
        if (member == spec_.self) {
            part = own_part(spec_.self, chunk);
            if (part == nullptr) return;
        }
        codec_.add(part->payload(), n, spec_.shares[member], sum);
    }
    publish(chunk, sum, awakened);
}

// Into the buffers of the mean.
void Reduce::write(const PacketPtr& packet) {
    const Frame& frame = packet->frame;
    const uint64_t n = chunk_size(frame.shard, frame.chunk), start = chunk_start(frame.shard, frame.chunk);
    const bool is_read_again = spec_.error != nullptr && frame.shard == spec_.self;
    (is_read_again ? codec_.decode : codec_.decode_away)(packet->payload(), n, spec_.out + start);
    if (spec_.encoded_out != nullptr)
        put_part(spec_.codec, packet->payload(), start, n, spec_.encoded_out, spec_.numel());
}

// The mean of an own chunk: encoded once, adopted as decoded, sent on.
void Reduce::publish(uint32_t chunk, const float* mean, std::vector<uint32_t>& awakened) {
    const uint64_t n = chunk_size(spec_.self, chunk), start = chunk_start(spec_.self, chunk);
    PacketPtr packet = pool_->lend(frame_of(FINAL, spec_.self, chunk));
    if (!encode(mean, packet, n, static_cast<int64_t>(start))) return;
    write(packet);
    const float share = spec_.shares[spec_.self];
    for (uint64_t i = 0; spec_.error != nullptr && i < n; ++i) {  // all-to-all: beside that of the own part
        const float taken = (mean[i] - spec_.out[start + i]) / share;
        spec_.error[start + i] = spec_.is_ring ? taken : spec_.error[start + i] + taken;
    }
    if (spec_.is_ring) {
        enqueue(ring_neighbour(1), packet, awakened);
    } else {
        for (uint32_t step = 1; step < spec_.world(); ++step)
            enqueue((spec_.self + step) % spec_.world(), packet, awakened);
    }
    settle(0, 1);
}

// Ring: a partial sum, to be added to and sent on; at its owner it becomes the mean.
void Reduce::pass_on(PacketPtr packet, std::vector<uint32_t>& awakened) {
    const Frame& frame = packet->frame;
    const uint64_t n = chunk_size(frame.shard, frame.chunk), start = chunk_start(frame.shard, frame.chunk);
    const float share = spec_.shares[spec_.self];
    float* sum = scratch<Room::SUM>(n);
    codec_.decode(packet->payload(), n, sum);
    add_own(frame.shard, frame.chunk, sum);
    if (frame.shard == spec_.self) return publish(frame.chunk, sum, awakened);
    if (share > 0) {
        if (!encode(sum, packet, n, static_cast<int64_t>(start))) return;
        note_error(sum, packet, n, start, share);
    }
    enqueue(ring_neighbour(1), packet, awakened);
}

// A mean: decoded, and in a ring sent on until it is back before its owner.
void Reduce::adopt(const PacketPtr& packet, std::vector<uint32_t>& awakened) {
    const Frame& frame = packet->frame;
    write(packet);
    if (spec_.is_ring && ring_neighbour(1) != frame.shard) enqueue(ring_neighbour(1), packet, awakened);
    settle(0, 1);
}

}  // namespace zeroband
