// Base of operations between the members of an epoch: a state machine without sockets that returns the frames to send
// to each member and accepts received ones. Thread-safe; encoding and decoding run outside its lock.
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

// Bytes exchanged with one other node.
struct Traffic {
    uint64_t sent_bytes = 0, to_send_bytes = 0;
    uint64_t received_bytes = 0, to_receive_bytes = 0;
    uint64_t missing_part_bytes = 0;  // missing contributions, which the sender has had from the start
    double first_sent_s = 0, last_sent_s = 0, last_received_s = 0;  // monotonic clock; 0: never
};

class Transfer {
  public:
    // Per operation; the tables of chunks and expected frames must fit into memory.
    static constexpr uint64_t MOST_CHUNKS = uint64_t{1} << 31, MOST_FRAMES = uint64_t{1} << 34;

    virtual ~Transfer() = default;
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    const Operation& operation() const { return operation_; }
    uint32_t self() const { return self_; }

    // Does the local work. Call first.
    virtual void begin() = 0;

    // Returns the next frame for a member; null: none now. The packet is shared: do not modify it.
    PacketPtr next(uint32_t peer);

    // Whether a frame with this header from `peer` is expected.
    virtual bool expects(uint32_t peer, const Frame& frame) const = 0;

    // Accepts an expected frame. Appends the members that now have something to be sent.
    void receive(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened);

    // Records that a frame from `next` was passed to the kernel.
    void sent(uint32_t peer, size_t payload_bytes);

    // Allows this fraction of the frames to be sent; and whether all allowed ones have been.
    void allow(double share);
    bool has_sent_what_is_allowed() const;

    // Ends it; on return no caller's buffer is accessed any more. Only the first reason counts.
    void end(TransferState reason, int64_t detail);

    // Waits for the end; false: timed out.
    bool wait(double seconds);

    TransferState state() const { return static_cast<TransferState>(state_.load()); }
    // NOT_FINITE: index of the value; FOREIGN_FRAME, PEER_LOST and OUT_OF_RANGE: the member.
    int64_t detail() const { return detail_.load(); }
    Traffic traffic(uint32_t peer) const;

  protected:
    // Guards access to the caller's buffers; false if the operation has ended. `busy_` is incremented before `state_`
    // is read, and `end` writes `state_` before it reads `busy_`. Both must be sequentially consistent (Dekker's
    // pattern): with weaker orders a thread could enter unseen while `end` returns the buffers.
    struct Busy {
        explicit Busy(Transfer& transfer) : transfer_(transfer) { ++transfer_.busy_; }
        ~Busy() { --transfer_.busy_; }
        explicit operator bool() const { return transfer_.state_.load() == RUNNING; }
        Transfer& transfer_;
    };

    Transfer(const Operation& operation, uint32_t self, uint32_t world, std::shared_ptr<PacketPool> pool);

    // For constructors: count the frames exchanged with each member, then finish.
    void count(uint32_t peer, uint64_t payload_bytes, bool sends, bool is_part = false);
    void counted(uint64_t to_write, uint64_t to_see, double allowed);

    // With the lock held: reserves the next frame to build for a member; false: there is none.
    virtual bool claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) = 0;
    // Builds it; null if that ended the operation.
    virtual PacketPtr make(uint32_t shard, uint32_t chunk) = 0;
    // Unique number below `to_see` of each expected frame.
    virtual uint64_t number_of(uint32_t peer, const Frame& frame) const = 0;
    virtual void take(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) = 0;

    void enqueue(uint32_t peer, const PacketPtr& packet, std::vector<uint32_t>& awakened);
    void fail(TransferState reason, int64_t detail);
    // Counts finished work; the last unit ends the operation as DONE.
    void settle(uint64_t sent, uint64_t written);

    const std::shared_ptr<PacketPool> pool_;
    mutable std::mutex mutex_;

  private:
    // With the lock held: the first final state wins.
    void set_final(TransferState reason, int64_t detail);

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
