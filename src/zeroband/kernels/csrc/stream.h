// One TCP connection to another node, used by one thread: frames out, frames in, sealed if it has keys.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "packet.h"

namespace zeroband {

enum class Io { OPEN, BLOCKED, BROKEN };

// Takes the bytes that arrive apart into frames. Knows no socket, so that it can be fed anything.
class FrameReader {
  public:
    enum class Verdict { TAKE, SKIP, HOLD, REFUSE };

    // `judge`: what to do with a frame, told by its header alone, before any memory is spent on it. A sealed header
    // has a tag of its own and was opened before, so no relay decides what is held or for how long.
    // `deliver`: a whole frame that was to be taken, opened.
    struct Sink {
        std::function<Verdict(const Frame&)> judge;
        std::function<void(PacketPtr)> deliver;
    };

    FrameReader(std::shared_ptr<PacketPool> pool, std::unique_ptr<Sealer> opener)
        : pool_(std::move(pool)), opener_(std::move(opener)) {}

    // Where the next bytes belong and how many fit; `more` is for those behind them.
    struct Room {
        uint8_t* at;
        size_t bytes;
        uint8_t* more;
        size_t more_bytes;
    };
    Room room();

    // n bytes were written to the room. False: not a frame, or not one that the other end sealed.
    bool filled(size_t n, const Sink& sink);

    // A frame is held: judge it again.
    bool retry(const Sink& sink);
    bool is_holding() const { return is_holding_; }

    // Of the frames that were taken, as they came.
    uint64_t taken_bytes() const { return taken_bytes_; }

  private:
    bool took_header(const Sink& sink);
    bool judged(FrameReader::Verdict verdict);
    bool took_payload(const Sink& sink);
    size_t tag_bytes() const { return opener_ ? TAG_BYTES : 0; }
    size_t header_bytes() const { return HEADER_BYTES + tag_bytes(); }

    const std::shared_ptr<PacketPool> pool_;
    const std::unique_ptr<Sealer> opener_;
    uint8_t header_[HEADER_BYTES + TAG_BYTES];
    size_t header_filled_ = 0;
    Frame frame_{};
    PacketPtr packet_;
    bool is_skipped_ = false;
    bool is_holding_ = false;
    size_t filled_ = 0, wanted_ = 0;  // of the payload and its tag
    uint64_t taken_bytes_ = 0;
};

class Stream {
  public:
    Stream(int fd, uint32_t link, std::shared_ptr<PacketPool> pool, const uint8_t* seal_key, const uint8_t* open_key);
    ~Stream();

    int fd() const { return fd_; }
    uint32_t link() const { return link_; }

    // Reads what is there, up to some hundred kilobytes. BLOCKED: nothing more for now, or a frame is held.
    Io read(const FrameReader::Sink& sink);
    FrameReader& reader() { return reader_; }

    // Has the packet sent; only while `is_sending()` is false.
    void put(PacketPtr packet);
    bool is_sending() const { return packet_ != nullptr; }
    // Sends on. OPEN: all of the packet is with the kernel.
    Io write();
    const PacketPtr& packet() const { return packet_; }
    void clear() { packet_.reset(); }

    uint64_t received_bytes() const { return received_bytes_; }

    // Kept by the loop that owns the stream.
    bool awaits_room = false;

  private:
    const int fd_;
    const uint32_t link_;
    const std::shared_ptr<PacketPool> pool_;
    std::unique_ptr<Sealer> sealer_;
    FrameReader reader_;
    PacketPtr packet_;
    std::unique_ptr<uint8_t[]> sealed_;
    size_t sealed_capacity_ = 0;
    const uint8_t* at_ = nullptr;
    size_t left_ = 0;
    uint64_t received_bytes_ = 0;
};

}  // namespace zeroband
