// Gathers the members' payloads, which are opaque bytes. Every member sends its own to all others, or to a single
// receiver; empty payloads are not sent.
//
// With sites a payload goes to one member of each other site, which relays the pieces inside its site as they arrive,
// straight from the result buffer.
#pragma once

#include "transfer.h"

namespace zeroband {

constexpr uint32_t NOBODY = UINT32_MAX;

struct GatherSpec {
    Operation operation;
    uint32_t self;
    std::vector<uint64_t> lengths;  // of each member's payload, in bytes
    std::vector<uint32_t> sources;  // member from which each payload arrives; NOBODY: it does not
    std::vector<bool> receivers;    // members that get the own payload from here
    std::vector<bool> near;         // members of the own site, to which payloads from other sites are relayed
    uint64_t chunk_bytes;
    const uint8_t* in;              // lengths[self]
    uint8_t* out;                   // all payloads in member order, if this member receives them
    double allowed = 1;             // fraction of the frames that may be sent until `allow` raises it

    uint32_t world() const { return static_cast<uint32_t>(lengths.size()); }
    bool is_relayed(uint32_t sender) const { return sender != self && sources[sender] == sender && !near[sender]; }
};

// Returns why a spec is invalid; null: it is valid. Does not access its buffers.
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
    std::vector<uint64_t> first_chunk_;  // of every payload, numbered over all payloads
    std::vector<uint32_t> next_chunk_;   // of the own payload, by peer
    std::vector<Chunk> arrived_;         // to be relayed to all members in `near`, in order of arrival
    std::vector<size_t> next_arrived_;   // index in `arrived_`, by peer
};

}  // namespace zeroband
