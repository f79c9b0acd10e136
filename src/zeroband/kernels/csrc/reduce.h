// One weighted mean over the members of an epoch.
//
// All-to-all: every member sends each owner of a shard its encoded part; the owner sums the parts in the order of the
// members, encodes the mean once and sends that to everybody. Ring: a shard's partial sum goes once around the members
// to its owner, its mean once around again. Either way everybody, the owner too, decodes the same bytes.
//
// At sites only those who speak for one own shards and do that. The members of a site stand in a chain that ends at its
// speaker: each adds its part to the site's mean that comes from behind, in float32, and passes it on; the speaker
// contributes that mean in place of its own values, and every mean of the reduction goes back down the chain as it came.
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
    std::vector<float> shares;     // of each member in the mean; 0: it adds nothing
    std::vector<uint32_t> order;   // in the ring, of those who speak for their sites
    std::vector<uint32_t> next;    // of each member in its site's chain, itself for the speaker; empty: all speak
    uint64_t chunk_numel;
    const float* in;
    float* out;
    float* error = nullptr;  // what the encodings of this member took, in units of `in`; its share must not be 0
    const uint8_t* encoded = nullptr;  // what `in` is as the codec encodes it: sent as it is, and `in` is not read
    uint8_t* encoded_out = nullptr;    // gets the mean as it travels
    std::vector<float> largest;      // |value| that each member announced; empty: not known
    double allowed = 1;  // share of the frames that may be sent before `allow` says more
    Robust robust;       // all-to-all without sites: how the owner of a shard combines what came
    Measured measured{};  // where not PLAIN: on the values of the own shard, from zeros
    const uint32_t* hash_key = nullptr;  // all-to-all: with it the pieces of the parts that come for the own shard are
    uint64_t* hashes = nullptr;           // hashed; by member, `hashes_of_member()` each, a chunk's pieces after another's

    uint32_t world() const { return static_cast<uint32_t>(shares.size()); }
    uint64_t numel() const { return bounds.back(); }
    uint64_t pieces_of_chunk() const { return (chunk_numel + PIECE - 1) / PIECE; }
    uint64_t hashes_of_member() const {
        return (bounds[self + 1] - bounds[self] + chunk_numel - 1) / chunk_numel * pieces_of_chunk();
    }
    uint32_t next_of(uint32_t member) const { return next.empty() ? member : next[member]; }
};

// What keeps a reduction from having this shape; null: nothing. Its buffers are not looked at.
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

    // What the site contributes: the speaker's own values where none stands behind it, else the mean in `out`, which
    // is read for the last time before the result is written there.
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
    std::vector<uint64_t> first_chunk_;          // of every shard, counted over all shards
    std::vector<float> site_shares_;             // of each site in the mean, by its speaker; 0 for everybody else
    float site_share_ = 0;                       // of this member's site
    float share_behind_ = 0;                     // of those who stand behind this member in its chain, together
    std::vector<float> part_limits_;             // |value| of the part of each site, by all of its members
    float limit_ = 0;                            // |value| of a mean, and of a partial sum
    uint32_t behind_;                            // who stands behind it; none: `world`
    std::vector<uint32_t> next_partial_;         // by shard: of those that start here
    std::vector<std::deque<uint32_t>> summed_;   // by shard: chunks of the site's mean that were not sent yet
    std::vector<bool> is_summed_;                // ring: chunks whose mean of the site is there
    std::vector<PacketPtr> held_;                // ring: partial sums that came before it
    std::vector<std::vector<PacketPtr>> parts_;  // all-to-all: of own chunks, by member
    std::vector<uint32_t> missing_;              // all-to-all: parts of own chunks that are not there, of other sites and
                                                 // of the own one where it has to be summed up
};

}  // namespace zeroband
