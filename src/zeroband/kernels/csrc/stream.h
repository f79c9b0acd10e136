// A TCP connection to another node that sends and receives frames, encrypted if it has keys. Used by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "packet.h"

namespace zeroband {

enum class Io { OPEN, BLOCKED, BROKEN };

// Parses received bytes into frames. Independent of sockets, for tests.
class FrameReader {
  public:
    enum class Verdict { TAKE, SKIP, HOLD, REFUSE };

    // `judge`: decides by the header alone, before any memory is allocated. Encrypted headers have a separate tag and
    // are authenticated first, so a relay cannot influence what is held.
    // `deliver`: receives a complete, decrypted frame.
    struct Sink {
        std::function<Verdict(const Frame&)> judge;
        std::function<void(PacketPtr)> deliver;
    };

    FrameReader(std::shared_ptr<PacketPool> pool, std::unique_ptr<Sealer> opener)
        : pool_(std::move(pool)), opener_(std::move(opener)) {}

    // Buffer for the next bytes; `more` is for those after them.
    struct Room {
        uint8_t* at;
        size_t bytes;
        uint8_t* more;
        size_t more_bytes;
    };
    Room room();

    // Processes n bytes written to the buffer. False: not a valid or authentic frame.
    bool filled(size_t n, const Sink& sink);

    // Judges a held frame again.
    bool retry(const Sink& sink);
    bool is_holding() const { return is_holding_; }

    // Payload bytes received of accepted frames.
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
    size_t filled_ = 0, wanted_ = 0;  // of the payload and tag
    uint64_t taken_bytes_ = 0;
};

class Stream {
  public:
    Stream(int fd, uint32_t link, std::shared_ptr<PacketPool> pool, const uint8_t* seal_key, const uint8_t* open_key);
    ~Stream();

    int fd() const { return fd_; }
    uint32_t link() const { return link_; }

    // Reads available data, up to some hundred kilobytes. BLOCKED: no more data, or a frame is held.
    Io read(const FrameReader::Sink& sink);
    FrameReader& reader() { return reader_; }

    // Starts sending a packet; requires that `is_sending()` is false.
    void put(PacketPtr packet);
    bool is_sending() const { return packet_ != nullptr; }
    // Continues sending. OPEN: the whole packet is in the kernel's buffer.
    Io write();
    const PacketPtr& packet() const { return packet_; }
    void clear() { packet_.reset(); }

    uint64_t received_bytes() const { return received_bytes_; }

    // Managed by the loop that owns the stream.
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
