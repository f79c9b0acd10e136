#include "gather.h"

#include <cstring>
#include <utility>

namespace zeroband {

namespace {

constexpr size_t MOST_MEMBERS = 1 << 16;
constexpr uint64_t MOST_BYTES = uint64_t{1} << 42;

// Whether the route names only members, and this one neither sends to itself nor receives its own payload.
bool has_routes(const GatherSpec& spec) {
    const uint32_t world = spec.world();
    for (const uint32_t source : spec.sources)
        if (source >= world && source != NOBODY) return false;
    for (uint32_t member = 0; member < world; ++member)
        if (member != spec.self && spec.sources[member] == spec.self) return false;
    const uint32_t own = spec.sources[spec.self];
    return (own == spec.self || own == NOBODY) && !spec.receivers[spec.self] && !spec.near[spec.self];
}

}  // namespace

const char* problem_of(const GatherSpec& spec) {
    const size_t world = spec.lengths.size();
    if (world < 2 || world > MOST_MEMBERS) return "a gathering has 2 to 65536 members";
    if (spec.self >= world) return "this node is none of the members";
    if (spec.sources.size() != world || spec.receivers.size() != world || spec.near.size() != world)
        return "the route says something of each member";
    if (spec.chunk_bytes == 0 || spec.chunk_bytes > LARGEST_PAYLOAD) return "a frame holds 1 byte to 16 MiB";
    uint64_t bytes = 0, chunks = 0;
    for (const uint64_t length : spec.lengths) {
        if (length > MOST_BYTES || (bytes += length) > MOST_BYTES) return "payloads have 2^42 bytes at most";
        chunks += (length + spec.chunk_bytes - 1) / spec.chunk_bytes;
    }
    if (chunks > Gather::MOST_CHUNKS) return "the frames are too many";
    if (!has_routes(spec)) return "the route names no member, or leads back to this node";
    if (!(spec.allowed >= 0)) return "the share of the frames to be sent must not be negative";
    return nullptr;
}

Gather::Gather(GatherSpec spec, std::shared_ptr<PacketPool> pool)
    : Transfer(spec.operation, spec.self, spec.world(), std::move(pool)),
      spec_(std::move(spec)),
      start_{0},
      first_chunk_{0},
      next_chunk_(spec_.world(), 0),
      next_arrived_(spec_.world(), 0) {
    for (const uint64_t length : spec_.lengths) {
        start_.push_back(start_.back() + length);
        first_chunk_.push_back(first_chunk_.back() + (length + spec_.chunk_bytes - 1) / spec_.chunk_bytes);
    }
    uint64_t to_write = 0;
    const auto count_sent = [this](const std::vector<bool>& peers, uint32_t sender, uint32_t chunk) {
        for (uint32_t peer = 0; peer < spec_.world(); ++peer)
            if (peers[peer]) count(peer, chunk_size(sender, chunk), true);
    };
    for (uint32_t sender = 0; sender < spec_.world(); ++sender)
        for (uint32_t chunk = 0; chunk < chunks_of(sender); ++chunk) {
            if (sender == spec_.self) count_sent(spec_.receivers, sender, chunk);
            if (sender == spec_.self || spec_.sources[sender] == NOBODY) continue;
            count(spec_.sources[sender], chunk_size(sender, chunk), false, true);
            ++to_write;
            if (spec_.is_relayed(sender)) count_sent(spec_.near, sender, chunk);
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
    if (spec_.sources[spec_.self] == spec_.self && own > 0) std::memcpy(spec_.out + start_[spec_.self], spec_.in, own);
    settle(0, 0);
}

bool Gather::claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) {
    if (spec_.receivers[peer] && next_chunk_[peer] < chunks_of(spec_.self)) {
        shard = spec_.self;
        chunk = next_chunk_[peer]++;
        return true;
    }
    if (!spec_.near[peer] || next_arrived_[peer] >= arrived_.size()) return false;
    const Chunk& arrived = arrived_[next_arrived_[peer]++];
    shard = arrived.sender;
    chunk = arrived.number;
    return true;
}

PacketPtr Gather::make(uint32_t shard, uint32_t chunk) {
    const uint64_t bytes = chunk_size(shard, chunk);
    PacketPtr packet = pool_->lend({spec_.operation, PAYLOAD, NO_CODEC, shard, chunk, static_cast<uint32_t>(bytes)});
    const uint8_t* const payload = shard == spec_.self ? spec_.in : spec_.out + start_[shard];
    std::memcpy(packet->payload(), payload + chunk * spec_.chunk_bytes, bytes);
    return packet;
}

bool Gather::expects(uint32_t peer, const Frame& frame) const {
    if (frame.kind != PAYLOAD || frame.codec != NO_CODEC) return false;
    const uint32_t world = spec_.world(), sender = frame.shard;
    if (peer == spec_.self || peer >= world || sender >= world || spec_.sources[sender] != peer) return false;
    return frame.chunk < chunks_of(sender) && frame.payload_bytes == chunk_size(sender, frame.chunk);
}

uint64_t Gather::number_of(uint32_t, const Frame& frame) const { return first_chunk_[frame.shard] + frame.chunk; }

void Gather::take(uint32_t, PacketPtr packet, std::vector<uint32_t>& awakened) {
    const uint32_t sender = packet->frame.shard, chunk = packet->frame.chunk;
    std::memcpy(spec_.out + start_[sender] + chunk * spec_.chunk_bytes, packet->payload(), packet->frame.payload_bytes);
    if (spec_.is_relayed(sender)) {
        std::lock_guard<std::mutex> lock(mutex_);
        arrived_.push_back({sender, chunk});
        for (uint32_t peer = 0; peer < spec_.world(); ++peer)
            if (spec_.near[peer]) awakened.push_back(peer);
    }
    settle(0, 1);
}

}  // namespace zeroband
