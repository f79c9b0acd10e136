// What every operation between the members of an epoch has in common, as a machine that knows no sockets: it says what
// to send to whom and takes what arrived. Any thread may call it; the work on what is sent happens outside its lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "packet.h"

namespace zeroband {

enum TransferState : int { RUNNING = 0, DONE = 1, ABORTED = 2, NOT_FINITE = 3, FOREIGN_FRAME = 4, PEER_LOST = 5, OUT_OF_RANGE = 6 };

// What moved between this node and one other.
struct Traffic {
    uint64_t sent_bytes = 0, to_send_bytes = 0;
    uint64_t received_bytes = 0, to_receive_bytes = 0;
    uint64_t missing_part_bytes = 0;  // of what is to be received: contributions that it need not wait for
    double first_sent_s = 0, last_sent_s = 0, last_received_s = 0;  // monotonic clock; 0: never
};

class Transfer {
  public:
    // Of one operation: its chunks, and the frames that may come; the tables of both have to fit into memory.
    static constexpr uint64_t MOST_CHUNKS = uint64_t{1} << 31, MOST_FRAMES = uint64_t{1} << 34;

    virtual ~Transfer() = default;
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    const Operation& operation() const { return operation_; }
    uint32_t self() const { return self_; }

    // Does what needs no other member. Before anything else.
    virtual void begin() = 0;

    // The next frame for a member; null: nothing now. The packet must not be written to.
    PacketPtr next(uint32_t peer);

    // Whether a frame from `peer` belongs here: right sizes, and not yet seen.
    virtual bool expects(uint32_t peer, const Frame& frame) const = 0;

    // Takes a frame that `expects` approved of. Appends the members that there is something new to send to.
    void receive(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened);

    // A frame from `next` was handed to the kernel.
    void sent(uint32_t peer, size_t payload_bytes);

    // Lets this share of the frames be sent; and whether all that may be sent are with the kernel.
    void allow(double share);
    bool has_sent_what_is_allowed() const;

    // Ends it; afterwards no buffer of the caller is read or written. Only the first reason counts.
    void end(TransferState reason, int64_t detail);

    // Waits until it ended; false: the time was over.
    bool wait(double seconds);

    TransferState state() const { return static_cast<TransferState>(state_.load()); }
    // NOT_FINITE: index of the value; FOREIGN_FRAME, PEER_LOST and OUT_OF_RANGE: the member.
    int64_t detail() const { return detail_.load(); }
    Traffic traffic(uint32_t peer) const;

  protected:
    // Held while a buffer of the caller is read or written; false when the operation has ended.
    struct Busy {
        explicit Busy(Transfer& transfer) : transfer_(transfer) { ++transfer_.busy_; }
        ~Busy() { --transfer_.busy_; }
        explicit operator bool() const { return transfer_.state_.load() == RUNNING; }
        Transfer& transfer_;
    };

    Transfer(const Operation& operation, uint32_t self, uint32_t world, std::shared_ptr<PacketPool> pool);

    // For the constructors: frames that are exchanged with a member, and then what there is of them in all.
    void count(uint32_t peer, uint64_t payload_bytes, bool sends, bool is_part = false);
    void counted(uint64_t to_write, uint64_t to_see, double allowed);

    // With the lock held: takes the next frame for a member that is not made yet; false: there is none.
    virtual bool claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) = 0;
    // Makes it; null where that ended the operation.
    virtual PacketPtr make(uint32_t shard, uint32_t chunk) = 0;
    // A number below `to_see` for each frame that may come.
    virtual uint64_t number_of(uint32_t peer, const Frame& frame) const = 0;
    virtual void take(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) = 0;

    void enqueue(uint32_t peer, const PacketPtr& packet, std::vector<uint32_t>& awakened);
    void fail(TransferState reason, int64_t detail);
    void settle(uint64_t sent, uint64_t written);

    const std::shared_ptr<PacketPool> pool_;
    mutable std::mutex mutex_;

  private:
    const Operation operation_;
    const uint32_t self_;
    std::vector<std::deque<PacketPtr>> outgoing_;  // by peer
    std::vector<bool> seen_;
    std::vector<Traffic> traffic_;
    uint64_t to_send_ = 0;                         // frames
    uint64_t all_frames_ = 0, handed_out_ = 0, allowed_ = 0;
    uint64_t to_write_ = 0;                        // chunks of the result

    std::condition_variable ended_;
    std::atomic<int> state_{RUNNING};
    std::atomic<int64_t> detail_{0};
    std::atomic<int> busy_{0};
};

double monotonic_s();

}  // namespace zeroband
