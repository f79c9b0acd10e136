// The engine: a few threads that move frames between streams and the operations that run. No thread of the caller is
// needed for anything to go on.
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

    // The member behind a link; at least the number of members where it is none.
    uint32_t member_of(uint32_t link) const;

    const std::unique_ptr<Transfer> transfer;
    const std::vector<uint32_t> link_of;  // by member; its own is not used
};

using RunningPtr = std::shared_ptr<Running>;

struct LinkState {
    bool is_up = false;
    uint32_t streams = 0;
    uint64_t received_bytes = 0;  // of frames that were taken, as they come
    uint32_t silent_ms = 0;       // for which nothing came: over the stream that was heard last,
    uint32_t stalest_ms = 0;      // and over the one that was not heard for longest
    uint32_t rtt_us = 0;         // of the fastest stream
    uint32_t unanswered_ms = 0;  // of the stream on which what was sent waits longest for any packet; 0: nothing waits
    uint32_t window = 0;         // packets that a stream may have under way, the mean of those that have any; 0: none has
    uint64_t sent_packets = 0;   // of data, on all streams; those sent again, too
    uint64_t resent_packets = 0;
};

class Engine {
  public:
    // Every stream shows itself to the other end after `beat_s` without anything else to send.
    Engine(int threads, double beat_s);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Ends what runs, the threads and the connections. From then on every link is down; anything may still be called.
    void close();

    // Takes over a connected socket as one of the link's streams; a link that was lost takes none. Keys may be null: nothing is
    // sealed.
    void add_stream(uint32_t link, int fd, const uint8_t* seal_key, const uint8_t* open_key);
    void drop_link(uint32_t link);
    LinkState link_state(uint32_t link);
    // Of all its streams; one that the machine lacks or does not allow changes nothing.
    void set_congestion(uint32_t link, const std::string& name);
    // The most that each of its streams sends; 0: what TCP finds.
    void set_pace(uint32_t link, uint64_t bytes_per_s);
    // How many of its streams send, the first ones; all receive.
    void set_senders(uint32_t link, uint32_t senders);

    RunningPtr start(ReduceSpec spec, std::vector<uint32_t> links);
    RunningPtr start(GatherSpec spec, std::vector<uint32_t> links);
    // Lets this share of an operation's frames be sent.
    void allow(const RunningPtr& running, double share);
    // Ends it where it still runs; afterwards its buffers are the caller's again.
    void finish(const RunningPtr& running);

    PacketPool& pool() { return *pool_; }

  private:
    friend class Loop;

    struct Link {
        bool is_up = true;
        std::map<int, double> streams;  // by descriptor: seconds for which nothing came
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
    std::vector<std::unique_ptr<Loop>> loops_;  // as they were made: each of them awakens all
};

}  // namespace zeroband
