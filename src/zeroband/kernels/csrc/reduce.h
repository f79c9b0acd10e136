// One weighted mean over the members of an epoch.
//
// All-to-all: every member sends each owner of a shard its encoded part; the owner sums the parts in the order of the
// members, encodes the mean once and sends that to everybody. Ring: a shard's partial sum goes once around the members
// to its owner, its mean once around again. Either way everybody, the owner too, decodes the same bytes.
#pragma once

#include "codec.h"
#include "transfer.h"

namespace zeroband {

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

    const ReduceSpec spec_;
    const Codec& codec_;
    std::vector<uint64_t> first_chunk_;          // of every shard, counted over all shards
    std::vector<uint32_t> next_partial_;         // all-to-all: by peer; ring: of the one shard that starts here
    std::vector<std::vector<PacketPtr>> parts_;  // all-to-all: of own chunks, by member
    std::vector<uint32_t> missing_;              // all-to-all: parts of own chunks that have not come
};

}  // namespace zeroband
