#include "gather.h"

#include <cstring>
#include <utility>

namespace zeroband {

Gather::Gather(GatherSpec spec, std::shared_ptr<PacketPool> pool)
    : Transfer(spec.operation, spec.self, spec.world(), std::move(pool)),
      spec_(std::move(spec)),
      start_{0},
      first_chunk_{0},
      next_chunk_(spec_.world(), 0) {
    for (const uint64_t length : spec_.lengths) {
        start_.push_back(start_.back() + length);
        first_chunk_.push_back(first_chunk_.back() + (length + spec_.chunk_bytes - 1) / spec_.chunk_bytes);
    }
    uint64_t to_write = 0;
    for (uint32_t peer = 0; peer < spec_.world(); ++peer) {
        if (peer == spec_.self) continue;
        for (uint32_t chunk = 0; receives(peer) && chunk < chunks_of(spec_.self); ++chunk)
            count(peer, chunk_size(spec_.self, chunk), true);
        for (uint32_t chunk = 0; receives(spec_.self) && chunk < chunks_of(peer); ++chunk, ++to_write)
            count(peer, chunk_size(peer, chunk), false);
    }
    counted(to_write, first_chunk_.back(), spec_.allowed);
}

uint64_t Gather::chunk_size(uint32_t member, uint32_t chunk) const {
    const uint64_t left = spec_.lengths[member] - chunk * spec_.chunk_bytes;
    return left < spec_.chunk_bytes ? left : spec_.chunk_bytes;
}

void Gather::begin() {
    Busy busy(*this);
    const uint64_t own = spec_.lengths[spec_.self];
    if (receives(spec_.self) && own > 0) std::memcpy(spec_.out + start_[spec_.self], spec_.in, own);
    settle(0, 0);
}

bool Gather::claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) {
    if (!receives(peer) || next_chunk_[peer] >= chunks_of(spec_.self)) return false;
    shard = spec_.self;
    chunk = next_chunk_[peer]++;
    return true;
}

PacketPtr Gather::make(uint32_t shard, uint32_t chunk) {
    const uint64_t bytes = chunk_size(shard, chunk);
    PacketPtr packet = pool_->lend({spec_.operation, PAYLOAD, NO_CODEC, shard, chunk, static_cast<uint32_t>(bytes)});
    std::memcpy(packet->payload(), spec_.in + chunk * spec_.chunk_bytes, bytes);
    return packet;
}

bool Gather::expects(uint32_t peer, const Frame& frame) const {
    if (peer == spec_.self || peer >= spec_.world() || !receives(spec_.self)) return false;
    if (frame.kind != PAYLOAD || frame.codec != NO_CODEC || frame.shard != peer) return false;
    return frame.chunk < chunks_of(peer) && frame.payload_bytes == chunk_size(peer, frame.chunk);
}

uint64_t Gather::number_of(uint32_t peer, const Frame& frame) const { return first_chunk_[peer] + frame.chunk; }

void Gather::take(uint32_t peer, PacketPtr packet, std::vector<uint32_t>&) {
    uint8_t* const at = spec_.out + start_[peer] + packet->frame.chunk * spec_.chunk_bytes;
    std::memcpy(at, packet->payload(), packet->frame.payload_bytes);
    settle(0, 1);
}

}  // namespace zeroband
