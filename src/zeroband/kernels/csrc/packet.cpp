#include "packet.h"

namespace zeroband {
namespace {

constexpr size_t MOST_FREE = 512;

}  // namespace

PacketPtr PacketPool::lend(const Frame& frame) {
    std::unique_ptr<Packet> packet;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!free_.empty() && free_.back()->capacity >= frame.payload_bytes) {
            packet = std::move(free_.back());
            free_.pop_back();
        }
    }
    if (packet == nullptr) {
        packet = std::make_unique<Packet>();
        packet->capacity = frame.payload_bytes;
        packet->bytes.reset(new uint8_t[HEADER_BYTES + frame.payload_bytes + TAG_BYTES]);
    }
    packet->frame = frame;
    write_header(frame, packet->header());
    const size_t lent = lent_bytes_ += packet->capacity;
    size_t peak = peak_bytes_.load();
    while (lent > peak && !peak_bytes_.compare_exchange_weak(peak, lent)) {
    }
    // The deleter holds a reference to the pool, so packets may outlive the engine.
    const std::shared_ptr<PacketPool> self = shared_from_this();
    return PacketPtr(packet.release(), [self](Packet* returned) { self->take_back(returned); });
}

void PacketPool::take_back(Packet* packet) {
    std::unique_ptr<Packet> owned(packet);
    lent_bytes_ -= owned->capacity;
    if (owned->capacity == 0) return;  // a beat's packet has no payload, so no other frame could reuse it
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < MOST_FREE) free_.push_back(std::move(owned));
}

}  // namespace zeroband
