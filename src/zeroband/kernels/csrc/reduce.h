// One weighted mean over the members of an epoch, as a machine that knows no sockets: it says what to send to whom and
// takes what arrived. Any thread may call it; the work on values happens outside its lock.
//
// All-to-all: every member sends each owner of a shard its encoded part; the owner sums the parts in the order of the
// members, encodes the mean once and sends that to everybody. Ring: a shard's partial sum goes once around the members
// to its owner, its mean once around again. Either way everybody, the owner too, decodes the same bytes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "codec.h"
#include "packet.h"

namespace zeroband {

enum ReduceState : int { RUNNING = 0, DONE = 1, ABORTED = 2, NOT_FINITE = 3, FOREIGN_FRAME = 4, PEER_LOST = 5 };

struct ReduceSpec {
    Operation operation;
    CodecId codec;
    bool is_ring;
    uint32_t self;
    std::vector<uint64_t> bounds;  // shard s, owned by member s, is [bounds[s], bounds[s + 1])
    std::vector<float> shares;     // of each member in the mean; 0: it sends nothing
    std::vector<uint32_t> order;   // of the members in the ring
    uint64_t chunk_numel;
    const float* in;
    float* out;
    float* error = nullptr;  // what the encodings of this member took, in units of `in`; its share must not be 0
    const uint8_t* encoded = nullptr;  // what `in` is as the codec encodes it: sent as it is, and `in` is not read
    uint8_t* encoded_out = nullptr;    // gets the mean as it travels
    double allowed = 1;  // share of the frames that may be sent before `allow` says more

    uint32_t world() const { return static_cast<uint32_t>(shares.size()); }
    uint64_t numel() const { return bounds.back(); }
};

// What moved between this node and one other.
struct Traffic {
    uint64_t sent_bytes = 0, to_send_bytes = 0;
    uint64_t received_bytes = 0, to_receive_bytes = 0;
    double first_sent_s = 0, last_sent_s = 0, last_received_s = 0;  // monotonic clock; 0: never
};

class Reduce {
  public:
    Reduce(ReduceSpec spec, std::shared_ptr<PacketPool> pool);

    const ReduceSpec& spec() const { return spec_; }

    // Does what needs no other member. Before anything else.
    void begin();

    // The next frame for a member; null: nothing now. The packet must not be written to.
    PacketPtr next(uint32_t peer);

    // Whether a frame from `peer` belongs here: right sizes, and not yet seen.
    bool expects(uint32_t peer, const Frame& frame) const;

    // Takes a frame that `expects` approved of. Appends the members that there is something new to send to.
    void receive(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened);

    // A frame from `next` was handed to the kernel.
    void sent(uint32_t peer, size_t payload_bytes);

    // Lets this share of the frames be sent; and whether all that may be sent are with the kernel.
    void allow(double share);
    bool has_sent_what_is_allowed() const;

    // Ends it; afterwards neither `in` is read nor `out` and `error` written. Only the first reason counts.
    void end(ReduceState reason, int64_t detail);

    // Waits until it ended; false: the time was over.
    bool wait(double seconds);

    ReduceState state() const { return static_cast<ReduceState>(state_.load()); }
    // NOT_FINITE: index of the value; FOREIGN_FRAME and PEER_LOST: the member.
    int64_t detail() const { return detail_.load(); }
    Traffic traffic(uint32_t peer) const;

  private:
    struct Busy;

    uint64_t chunks_of(uint32_t shard) const { return first_chunk_[shard + 1] - first_chunk_[shard]; }
    uint64_t chunk_start(uint32_t shard, uint32_t chunk) const;
    uint64_t chunk_size(uint32_t shard, uint32_t chunk) const;
    Frame frame_of(FrameKind kind, uint32_t shard, uint32_t chunk) const;
    uint32_t ring_neighbour(uint32_t step) const;
    void count_traffic();

    bool claim_partial(uint32_t peer, uint32_t& shard, uint32_t& chunk);
    PacketPtr encode_partial(uint32_t shard, uint32_t chunk);
    PacketPtr own_part(uint32_t shard, uint32_t chunk);
    void add_own(uint32_t shard, uint32_t chunk, float* sum);
    void collect(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened);
    void pass_on(PacketPtr packet, std::vector<uint32_t>& awakened);
    void adopt(const PacketPtr& packet, std::vector<uint32_t>& awakened);
    void finish(uint32_t chunk, const std::vector<PacketPtr>& parts, std::vector<uint32_t>& awakened);
    void write(const PacketPtr& packet);
    void publish(uint32_t chunk, const float* mean, std::vector<uint32_t>& awakened);
    bool encode(const float* values, const PacketPtr& packet, uint64_t n, int64_t start);
    void note_error(const float* values, const PacketPtr& packet, uint64_t n, uint64_t start, float share);
    void enqueue(uint32_t peer, const PacketPtr& packet, std::vector<uint32_t>& awakened);
    void settle(uint64_t sent, uint64_t written);

    const ReduceSpec spec_;
    const Codec& codec_;
    const std::shared_ptr<PacketPool> pool_;
    std::vector<uint64_t> first_chunk_;  // of every shard, counted over all shards

    mutable std::mutex mutex_;
    std::vector<uint32_t> next_partial_;          // all-to-all: by peer; ring: of the one shard that starts here
    std::vector<std::deque<PacketPtr>> outgoing_;  // by peer
    std::vector<std::vector<PacketPtr>> parts_;    // all-to-all: of own chunks, by member
    std::vector<uint32_t> missing_;               // all-to-all: parts of own chunks that have not come
    std::vector<bool> seen_;                      // (kind, chunk, sender)
    std::vector<Traffic> traffic_;
    uint64_t to_send_ = 0;                        // frames
    uint64_t all_frames_ = 0, handed_out_ = 0, allowed_ = 0;
    uint64_t to_write_ = 0;                       // chunks of `out`

    std::condition_variable ended_;
    std::atomic<int> state_{RUNNING};
    std::atomic<int64_t> detail_{0};
    std::atomic<int> busy_{0};
};

double monotonic_s();

}  // namespace zeroband
