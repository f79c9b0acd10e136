// The engine: a few threads that move frames between streams and running operations, without any caller's thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gather.h"
#include "reduce.h"
#include "stream.h"

namespace zeroband {

class Loop;

// An operation and the links to its members.
struct Running {
    Running(std::unique_ptr<Transfer> begun, std::vector<uint32_t> links)
        : transfer(std::move(begun)), link_of(std::move(links)) {}

    // Member at the other end of a link; the number of members if there is none.
    uint32_t member_of(uint32_t link) const;

    const std::unique_ptr<Transfer> transfer;
    const std::vector<uint32_t> link_of;  // by member; the own one is unused
};

using RunningPtr = std::shared_ptr<Running>;

struct LinkState {
    bool is_up = false;
    uint32_t streams = 0;
    uint64_t received_bytes = 0;  // of accepted frames
    uint32_t silent_ms = 0;       // silence of the most recently heard stream
    uint32_t stalest_ms = 0;      // silence of the longest-silent stream
    uint32_t rtt_us = 0;          // of the fastest stream
    uint32_t unanswered_ms = 0;   // since the last packet on a stream with unacknowledged data, the worst one; 0: none
    uint32_t window = 0;          // mean congestion window of the sending streams, in packets; 0: none is sending
    uint64_t sent_packets = 0;    // data packets of all streams, including retransmissions
    uint64_t resent_packets = 0;
};

class Engine {
  public:
    // Each stream sends a beat after `beat_s` without other frames.
    Engine(int threads, double beat_s);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Ends operations, threads and connections. Afterwards every link is down; all functions may still be called.
    void close();

    // Adds a connected socket to a link and takes ownership; a lost link closes it. Null keys: no encryption.
    void add_stream(uint32_t link, int fd, const uint8_t* seal_key, const uint8_t* open_key);
    void drop_link(uint32_t link);
    LinkState link_state(uint32_t link);
    // For all its streams; unknown or forbidden names change nothing.
    void set_congestion(uint32_t link, const std::string& name);
    // Pacing rate of each of its streams; 0: unlimited.
    void set_pace(uint32_t link, uint64_t bytes_per_s);
    // Only the first `senders` streams send; all receive.
    void set_senders(uint32_t link, uint32_t senders);

    RunningPtr start(ReduceSpec spec, std::vector<uint32_t> links);
    RunningPtr start(GatherSpec spec, std::vector<uint32_t> links);
    // Allows this fraction of an operation's frames to be sent.
    void allow(const RunningPtr& running, double share);
    // Ends it; afterwards its buffers belong to the caller again.
    void finish(const RunningPtr& running);

    PacketPool& pool() { return *pool_; }

  private:
    friend class Loop;

    struct Link {
        bool is_up = true;
        std::map<int, double> streams;  // by descriptor: seconds of silence
        uint32_t senders = UINT32_MAX;
        uint64_t received_bytes = 0;
    };

    RunningPtr start(std::unique_ptr<Transfer> transfer, std::vector<uint32_t> links);
    FrameReader::Verdict judge(uint32_t link, const Frame& frame);
    void deliver(uint32_t link, PacketPtr packet);
    void heard(uint32_t link, int fd, double silent_s, uint64_t received_bytes);
    bool is_sender(uint32_t link, int fd);
    PacketPtr pick(uint32_t link, int fd, RunningPtr& running);
    void lose_stream(uint32_t link);
    void end_what_needs(uint32_t link);
    void awaken(const Running& running, const std::vector<uint32_t>& members);
    RunningPtr running_of(const Operation& operation);
    std::vector<RunningPtr> all_running();

    const double beat_s_;
    const std::shared_ptr<PacketPool> pool_ = std::make_shared<PacketPool>();
    std::mutex mutex_;
    std::vector<RunningPtr> running_;  // oldest first
    bool has_started_ = false;
    Operation newest_{};
    std::map<uint32_t, Link> links_;
    uint32_t next_loop_ = 0;
    std::once_flag closed_;
    bool is_closed_ = false;
    std::vector<std::unique_ptr<Loop>> loops_;  // declared last: each loop's thread uses all members above
};

}  // namespace zeroband
