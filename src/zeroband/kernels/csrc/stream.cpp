#include "stream.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace zeroband {
namespace {

constexpr size_t MOST_READ_AT_ONCE = size_t{512} << 10;
constexpr size_t SKIPPED_AT_ONCE = size_t{64} << 10;

uint8_t* discarded() {
    thread_local uint8_t room[SKIPPED_AT_ONCE];
    return room;
}

std::unique_ptr<Sealer> sealer_of(const uint8_t* key, bool seals) {
    return key == nullptr ? nullptr : std::make_unique<Sealer>(key, seals);
}

}  // namespace

FrameReader::Room FrameReader::room() {
    uint8_t* header = header_ + header_filled_;
    if (wanted_ == 0) return {header, header_bytes() - header_filled_, nullptr, 0};
    const size_t left = wanted_ - filled_;
    // A skipped encrypted frame must be decrypted all the same, to keep the nonce counters in step.
    if (is_skipped_ && !opener_) return {discarded(), std::min(left, SKIPPED_AT_ONCE), nullptr, 0};
    return {packet_->payload() + filled_, left, header_, header_bytes()};
}

bool FrameReader::filled(size_t n, const Sink& sink) {
    if (wanted_ > 0) {
        const size_t taken = std::min(n, wanted_ - filled_);
        filled_ += taken;
        if (!is_skipped_) taken_bytes_ += taken;
        n -= taken;
        if (filled_ == wanted_ && !took_payload(sink)) return false;
    }
    header_filled_ += n;
    return header_filled_ < header_bytes() || took_header(sink);
}

bool FrameReader::took_header(const Sink& sink) {
    if (opener_ && !opener_->open(header_, HEADER_BYTES, header_ + HEADER_BYTES, 0)) return false;
    return read_header(header_, frame_) && judged(sink.judge(frame_));
}

bool FrameReader::retry(const Sink& sink) { return judged(sink.judge(frame_)); }

bool FrameReader::judged(Verdict verdict) {
    if (verdict == Verdict::REFUSE) return false;
    is_holding_ = verdict == Verdict::HOLD;
    if (is_holding_) return true;
    is_skipped_ = verdict == Verdict::SKIP;
    if (!is_skipped_ || opener_) packet_ = pool_->lend(frame_);
    header_filled_ = 0;
    filled_ = 0;
    wanted_ = frame_.payload_bytes + tag_bytes();
    return true;
}

bool FrameReader::took_payload(const Sink& sink) {
    filled_ = wanted_ = 0;
    PacketPtr packet = std::move(packet_);
    packet_.reset();
    if (opener_ && !opener_->open(packet->header(), HEADER_BYTES, packet->payload(), frame_.payload_bytes)) return false;
    if (!is_skipped_) sink.deliver(std::move(packet));
    return true;
}

Stream::Stream(int fd, uint32_t link, std::shared_ptr<PacketPool> pool, const uint8_t* seal_key,
               const uint8_t* open_key)
    : fd_(fd),
      link_(link),
      pool_(std::move(pool)),
      sealer_(sealer_of(seal_key, true)),
      reader_(pool_, sealer_of(open_key, false)) {}

Stream::~Stream() { close(fd_); }

Io Stream::read(const FrameReader::Sink& sink) {
    size_t total = 0;
    while (total < MOST_READ_AT_ONCE) {
        if (reader_.is_holding()) return Io::BLOCKED;
        const FrameReader::Room room = reader_.room();
        iovec parts[2] = {{room.at, room.bytes}, {room.more, room.more_bytes}};
        const ssize_t n = readv(fd_, parts, room.more_bytes > 0 ? 2 : 1);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Io::BLOCKED;
        if (n <= 0) return Io::BROKEN;
        total += static_cast<size_t>(n);
        received_bytes_ += static_cast<uint64_t>(n);
        if (!reader_.filled(static_cast<size_t>(n), sink)) return Io::BROKEN;
    }
    return Io::OPEN;
}

void Stream::put(PacketPtr packet) {
    const size_t bytes = packet->frame.payload_bytes;
    at_ = packet->header();
    left_ = HEADER_BYTES + bytes;
    if (sealer_) {
        left_ += 2 * TAG_BYTES;
        if (sealed_capacity_ < left_) {
            sealed_capacity_ = left_;
            sealed_.reset(new uint8_t[sealed_capacity_]);
        }
        uint8_t* const sealed = sealed_.get();
        std::memcpy(sealed, packet->header(), HEADER_BYTES);
        sealer_->seal(packet->header(), HEADER_BYTES, nullptr, 0, sealed + HEADER_BYTES);
        sealer_->seal(packet->header(), HEADER_BYTES, packet->payload(), bytes, sealed + HEADER_BYTES + TAG_BYTES);
        at_ = sealed;
    }
    packet_ = std::move(packet);
}

Io Stream::write() {
    while (left_ > 0) {
        const ssize_t n = send(fd_, at_, left_, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Io::BLOCKED;
        if (n <= 0) return Io::BROKEN;
        at_ += n;
        left_ -= static_cast<size_t>(n);
    }
    return Io::OPEN;
}

}  // namespace zeroband
