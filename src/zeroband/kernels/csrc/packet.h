// Packets: a frame in one buffer, with its header before and space for the tag after the payload, ready to send.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "frame.h"
#include "seal.h"

namespace zeroband {

struct Packet {
    Frame frame;
    size_t capacity;  // of the payload
    std::unique_ptr<uint8_t[]> bytes;

    uint8_t* header() { return bytes.get(); }
    uint8_t* payload() { return bytes.get() + HEADER_BYTES; }
};

using PacketPtr = std::shared_ptr<Packet>;

// Recycles packets, and tracks the peak memory of those in use. Thread-safe; a packet returns when its last reference
// goes.
class PacketPool : public std::enable_shared_from_this<PacketPool> {
  public:
    // Returns a packet for this frame with its header written.
    PacketPtr lend(const Frame& frame);

    size_t peak_bytes() const { return peak_bytes_.load(); }
    void forget_peak() { peak_bytes_ = lent_bytes_.load(); }

  private:
    void take_back(Packet* packet);

    std::mutex mutex_;
    std::vector<std::unique_ptr<Packet>> free_;
    std::atomic<size_t> lent_bytes_{0};
    std::atomic<size_t> peak_bytes_{0};
};

}  // namespace zeroband
