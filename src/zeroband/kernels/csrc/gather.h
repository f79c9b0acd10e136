// The members' payloads side by side: bytes that nothing here looks into. Every member sends its own to each of the
// others, or to one of them alone; a payload of no bytes is one that its member does not send.
//
// At sites a payload goes to one member of each other site, which passes it on inside that site: piece by piece
// as they come, out of the buffer that they lie in anyhow.
#pragma once

#include "transfer.h"

namespace zeroband {

constexpr uint32_t NOBODY = UINT32_MAX;

struct GatherSpec {
    Operation operation;
    uint32_t self;
    std::vector<uint64_t> lengths;  // of each member's payload, in bytes
    std::vector<uint32_t> sources;  // who brings each member's payload here: NOBODY where it does not come
    std::vector<bool> receivers;    // who gets the own payload from here
    std::vector<bool> near;         // who gets from here what members that are not of them send
    uint64_t chunk_bytes;
    const uint8_t* in;              // lengths[self]
    uint8_t* out;                   // all payloads in the order of the members; of a member that receives them
    double allowed = 1;             // share of the frames that may be sent before `allow` says more

    uint32_t world() const { return static_cast<uint32_t>(lengths.size()); }
    bool is_relayed(uint32_t sender) const { return sender != self && sources[sender] == sender && !near[sender]; }
};

// What keeps a gathering from having this shape; null: nothing. Its buffers are not looked at.
const char* problem_of(const GatherSpec& spec);

class Gather : public Transfer {
  public:
    Gather(GatherSpec spec, std::shared_ptr<PacketPool> pool);

    void begin() override;
    bool expects(uint32_t peer, const Frame& frame) const override;

  protected:
    bool claim(uint32_t peer, uint32_t& shard, uint32_t& chunk) override;
    PacketPtr make(uint32_t shard, uint32_t chunk) override;
    uint64_t number_of(uint32_t peer, const Frame& frame) const override;
    void take(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) override;

  private:
    struct Chunk {
        uint32_t sender, number;
    };

    uint64_t chunks_of(uint32_t member) const { return first_chunk_[member + 1] - first_chunk_[member]; }
    uint64_t chunk_size(uint32_t member, uint32_t chunk) const;

    const GatherSpec spec_;
    std::vector<uint64_t> start_;        // of every payload in `out`
    std::vector<uint64_t> first_chunk_;  // of every payload, counted over all of them
    std::vector<uint32_t> next_chunk_;   // of the own payload, by peer
    std::vector<Chunk> arrived_;         // to be passed on to all who are near, in the order in which they came
    std::vector<size_t> next_arrived_;   // of these, by peer
};

}  // namespace zeroband
