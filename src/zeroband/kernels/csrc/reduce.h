// A weighted mean over the members of an epoch.
//
// All-to-all: every member sends each shard's owner its encoded part; the owner sums the parts in member order, encodes
// the mean once and sends it to all. Ring: a shard's partial sum goes once around the ring to its owner, then its mean
// goes around. In both, all members including the owner decode the same bytes, so the results are bit-identical.
//
// With sites only speakers own shards and take part in that. The members of a site form a chain that ends at the
// speaker: each adds its part in float32 to the partial sum from behind and passes it on; the speaker contributes the
// site's mean instead of its own values, and sends each encoded mean of the reduction back down the chain unchanged.
#pragma once

#include "codec.h"
#include "robust.h"
#include "transfer.h"

namespace zeroband {

constexpr uint32_t MOST_MEMBERS = 1 << 16;
constexpr uint64_t MOST_NUMEL = uint64_t{1} << 40;

struct ReduceSpec {
    Operation operation;
    CodecId codec;
    bool is_ring;
    uint32_t self;
    std::vector<uint64_t> bounds;  // shard s, owned by member s, is [bounds[s], bounds[s + 1])
    std::vector<float> shares;     // coefficient of each member; 0: it adds nothing
    std::vector<uint32_t> order;   // ring order of the speakers
    std::vector<uint32_t> next;    // next member in its site's chain, a speaker's is itself; empty: no sites
    uint64_t chunk_numel;
    const float* in;
    float* out;
    float* error = nullptr;  // receives this member's encoding error, in units of `in`; its share must not be 0
    const uint8_t* encoded = nullptr;  // replaces `in`, which is not read: the contribution already encoded
    uint8_t* encoded_out = nullptr;    // receives the encoded mean
    std::vector<float> largest;      // largest |value| announced by each member; empty: unknown
    double allowed = 1;  // fraction of the frames that may be sent until `allow` raises it
    Robust robust;       // all-to-all without sites: how a shard's owner combines the parts
    Measured measured{};  // if not PLAIN: measurements on the own shard, zero-initialised
    // All-to-all: key and hashes of all pieces received for the own shard; by member, `hashes_of_member()` each, in
    // order of chunks and pieces.
    const uint32_t* hash_key = nullptr;
    uint64_t* hashes = nullptr;

    uint32_t world() const { return static_cast<uint32_t>(shares.size()); }
    uint64_t numel() const { return bounds.back(); }
    uint64_t pieces_of_chunk() const { return (chunk_numel + PIECE - 1) / PIECE; }
    uint64_t hashes_of_member() const {
        return (bounds[self + 1] - bounds[self] + chunk_numel - 1) / chunk_numel * pieces_of_chunk();
    }
    uint32_t next_of(uint32_t member) const { return next.empty() ? member : next[member]; }
};

// Returns why a spec is invalid; null: it is valid. Does not access its buffers.
const char* problem_of(const ReduceSpec& spec);

class Reduce : public Transfer {
  public:
    Reduce(ReduceSpec spec, std::shared_ptr<PacketPool> pool);

    void begin() override;
    bool expects(uint32_t peer, const Frame& frame) const override;

  protected:
    bool claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) override;
    PacketPtr make(uint32_t shard, uint32_t chunk) override;
    uint64_t number_of(uint32_t peer, const Frame& frame) const override;
    void take(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) override;

  private:
    uint64_t chunks_of(uint32_t shard) const { return first_chunk_[shard + 1] - first_chunk_[shard]; }
    uint64_t chunk_start(uint32_t shard, uint32_t chunk) const;
    uint64_t chunk_size(uint32_t shard, uint32_t chunk) const;
    Frame frame_of(FrameKind kind, uint32_t shard, uint32_t chunk) const;
    uint32_t ring_neighbour(uint32_t step) const;
    void count_traffic();
    void limit_values();
    bool is_within_limits(uint32_t peer, const PacketPtr& packet) const;

    // The site's chain.
    bool is_speaker() const { return spec_.next_of(spec_.self) == spec_.self; }
    bool sums_site() const { return is_speaker() && share_behind_ > 0; }
    Frame chain_frame(uint32_t shard, uint32_t chunk) const;
    PacketPtr chain_part(uint32_t shard, uint32_t chunk);
    void add_to_chain(PacketPtr packet, std::vector<uint32_t>& awakened);
    void use_site_mean(uint32_t shard, uint32_t chunk, std::vector<uint32_t>& awakened);
    void send_back(const PacketPtr& packet, std::vector<uint32_t>& awakened);

    // The site's contribution: the speaker's own values, or, with members behind it, the site's mean. That is stored in
    // `out`: each chunk is read for the last time before the result is written there.
    const float* contribution() const { return sums_site() ? spec_.out : spec_.in; }
    const uint8_t* encoding() const { return sums_site() ? nullptr : spec_.encoded; }

    PacketPtr own_part(uint32_t shard, uint32_t chunk);
    void add_own(uint32_t shard, uint32_t chunk, float share, float* sum);
    void add_site(uint32_t shard, uint32_t chunk, float* sum);
    void hash_part(uint32_t peer, const PacketPtr& packet);
    void collect(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened);
    void count_down(uint32_t chunk, std::vector<uint32_t>& awakened);
    void pass_on(PacketPtr packet, std::vector<uint32_t>& awakened);
    void adopt(const PacketPtr& packet, std::vector<uint32_t>& awakened);
    void finish(uint32_t chunk, const std::vector<PacketPtr>& parts, std::vector<uint32_t>& awakened);
    void combine_robustly(const std::vector<PacketPtr>& parts, uint64_t n, float* result);
    void write(const PacketPtr& packet);
    void blame(const std::vector<PacketPtr>& parts, uint64_t n, int64_t bad);
    int64_t publish(uint32_t chunk, const float* mean, std::vector<uint32_t>& awakened);
    bool encode(const float* values, const PacketPtr& packet, uint64_t n, int64_t start);
    void note_error(const float* values, const PacketPtr& packet, uint64_t n, uint64_t start, float share);

    const ReduceSpec spec_;
    const Codec& codec_;
    std::vector<uint64_t> first_chunk_;          // of every shard, numbered over all shards
    std::vector<float> site_shares_;             // of each site, at its speaker; 0 for other members
    float site_share_ = 0;                       // of this member's site
    float share_behind_ = 0;                     // sum over the members behind this one in its chain
    std::vector<float> part_limits_;             // limit of |value| of each site's part, for all its members
    float limit_ = 0;                            // limit of |value| of a mean and of a partial sum
    uint32_t behind_;                            // member directly behind it in the chain; `world`: none
    std::vector<uint32_t> next_partial_;         // by shard: next ring chunk that starts here
    std::vector<std::deque<uint32_t>> summed_;   // by shard: chunks of the site's mean not sent yet
    std::vector<bool> is_summed_;                // ring: chunks whose site mean is complete
    std::vector<PacketPtr> held_;                // ring: partial sums that arrived before the site's mean
    std::vector<std::vector<PacketPtr>> parts_;  // all-to-all: received parts of own chunks, by member
    std::vector<uint32_t> missing_;              // all-to-all: missing parts per own chunk, including the own site's sum
};

}  // namespace zeroband
