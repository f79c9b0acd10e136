// A loop: one thread of the engine, and the streams that only this thread reads and writes.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "engine.h"

namespace zeroband {

class Loop {
  public:
    Loop(Engine& engine, double beat_s);
    ~Loop();

    // Ends the thread and closes the streams. Call once.
    void end();

    // Any thread; ignored after `end`.
    void add(std::unique_ptr<Stream> stream);
    void drop(uint32_t link);
    void awaken(uint32_t link);
    void retry_held();

  private:
    struct Handle {
        std::unique_ptr<Stream> stream;
        RunningPtr running;  // operation of the packet being sent
        uint32_t events = 0;
        bool has_sent = false;  // since the last beat
        uint64_t heard_bytes = 0, taken_bytes = 0;
        double silent_s = 0;
    };

    void run();
    void post(std::function<void()> order);
    void take_orders();
    int ms_to_beat() const;
    void beat();
    void show(Handle& handle);
    void listen(Handle& handle, double passed_s);
    void watch(Handle& handle);
    void read(Handle& handle);
    void pump(Handle& handle);
    void close(int fd, bool is_lost);
    FrameReader::Sink sink_of(const Handle& handle);
    Handle* find(int fd);

    Engine& engine_;
    const double beat_s_;
    double beaten_at_s_;
    const int epoll_;
    const int wake_;
    std::atomic<bool> is_over_{false};
    std::mutex mutex_;
    std::vector<std::function<void()>> orders_;  // run in the loop's thread
    std::set<uint32_t> awakened_;
    bool is_woken_ = false;

    std::map<int, Handle> streams_;  // only the loop's thread
    std::thread thread_;             // declared last: it starts after all else is constructed
};

}  // namespace zeroband
