#include "loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace zeroband {
namespace {

constexpr int EVENTS_AT_ONCE = 64;
constexpr int FRAMES_AT_ONCE = 16;  // per stream and turn, for fairness
constexpr double STOOD_STILL = 3;    // beats: after a longer gap this thread itself was stopped

}  // namespace

Loop::Loop(Engine& engine, double beat_s)
    : engine_(engine),
      beat_s_(beat_s),
      beaten_at_s_(monotonic_s()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { run(); }) {}

Loop::~Loop() {
    if (thread_.joinable()) end();
    ::close(epoll_);
    ::close(wake_);
}

void Loop::end() {
    is_over_ = true;
    post([] {});
    thread_.join();
    streams_.clear();
    // Orders may own streams, so they must be destroyed after the lock is released: declared before it.
    std::vector<std::function<void()>> dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(orders_);
}

void Loop::post(std::function<void()> order) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        orders_.push_back(std::move(order));
        if (std::exchange(is_woken_, true)) return;
    }
    eventfd_write(wake_, 1);
}

void Loop::awaken(uint32_t link) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        awakened_.insert(link);
        if (std::exchange(is_woken_, true) || std::this_thread::get_id() == thread_.get_id()) return;
    }
    eventfd_write(wake_, 1);
}

void Loop::add(std::unique_ptr<Stream> stream) {
    auto shared = std::make_shared<std::unique_ptr<Stream>>(std::move(stream));
    post([this, shared] {
        const int fd = (*shared)->fd();
        Handle& handle = streams_[fd];
        handle.stream = std::move(*shared);
        handle.events = EPOLLIN;
        epoll_event event{};
        event.events = handle.events;
        event.data.fd = fd;
        epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
        pump(handle);
    });
}

// By link number, which is never reused, and not by descriptor, which the kernel may have reused meanwhile.
void Loop::drop(uint32_t link) {
    post([this, link] {
        std::vector<int> dropped;
        for (const auto& [fd, handle] : streams_)
            if (handle.stream->link() == link) dropped.push_back(fd);
        for (const int fd : dropped) close(fd, false);
    });
}

void Loop::retry_held() {
    post([this] {
        std::vector<int> held;
        for (auto& [fd, handle] : streams_)
            if (handle.stream->reader().is_holding()) held.push_back(fd);
        for (const int fd : held) {
            Handle& handle = streams_[fd];
            if (!handle.stream->reader().retry(sink_of(handle)))
                close(fd, true);
            else
                read(handle);
        }
    });
}

Loop::Handle* Loop::find(int fd) {
    const auto found = streams_.find(fd);
    return found == streams_.end() ? nullptr : &found->second;
}

void Loop::run() {
    epoll_event wake{};
    wake.events = EPOLLIN;
    wake.data.fd = wake_;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &wake);
    epoll_event events[EVENTS_AT_ONCE];
    while (!is_over_) {
        bool has_orders;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            has_orders = is_woken_;
        }
        const int ready = epoll_wait(epoll_, events, EVENTS_AT_ONCE, has_orders ? 0 : ms_to_beat());
        for (int i = 0; i < ready; ++i) {
            const int fd = events[i].data.fd;
            if (fd == wake_) {
                eventfd_t count;
                eventfd_read(wake_, &count);
                continue;
            }
            if (Handle* handle = find(fd); handle != nullptr && (events[i].events & EPOLLOUT) != 0) pump(*handle);
            if (Handle* handle = find(fd); handle != nullptr && (events[i].events & ~uint32_t{EPOLLOUT}) != 0) {
                if ((handle->events & EPOLLIN) == 0)
                    close(fd, true);  // a held stream waits for no input, so this is an error or hang-up
                else
                    read(*handle);
            }
        }
        take_orders();
        beat();
    }
}

int Loop::ms_to_beat() const {
    const double left_s = beaten_at_s_ + beat_s_ - monotonic_s();
    return left_s <= 0 ? 0 : static_cast<int>(1e3 * left_s) + 1;
}

// Sends beats on idle streams, and measures the silence of their other ends.
void Loop::beat() {
    const double now_s = monotonic_s(), passed_s = now_s - beaten_at_s_;
    if (passed_s < beat_s_) return;
    beaten_at_s_ = now_s;
    std::vector<int> idle;
    for (auto& [fd, handle] : streams_) {
        listen(handle, passed_s > STOOD_STILL * beat_s_ ? 0 : passed_s);
        if (!std::exchange(handle.has_sent, false) && !handle.stream->is_sending()) idle.push_back(fd);
    }
    for (const int fd : idle)
        if (Handle* handle = find(fd)) show(*handle);
}

void Loop::show(Handle& handle) {
    handle.stream->put(engine_.pool().lend({Operation{}, BEAT, NO_CODEC, 0, 0, 0}));
    pump(handle);
}

// A stream that holds back a frame is not read, so its silence does not count.
void Loop::listen(Handle& handle, double passed_s) {
    Stream& stream = *handle.stream;
    const bool is_heard = std::exchange(handle.heard_bytes, stream.received_bytes()) != stream.received_bytes();
    handle.silent_s = is_heard || stream.reader().is_holding() ? 0 : handle.silent_s + passed_s;
    const uint64_t taken_bytes = stream.reader().taken_bytes();
    engine_.heard(stream.link(), stream.fd(), handle.silent_s, taken_bytes - std::exchange(handle.taken_bytes, taken_bytes));
}

void Loop::take_orders() {
    std::vector<std::function<void()>> orders;
    std::set<uint32_t> awakened;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        orders.swap(orders_);
        awakened.swap(awakened_);
        is_woken_ = false;
    }
    for (const auto& order : orders) order();
    if (awakened.empty()) return;
    std::vector<int> idle;
    for (auto& [fd, handle] : streams_)
        if (!handle.stream->awaits_room && awakened.count(handle.stream->link()) > 0) idle.push_back(fd);
    for (const int fd : idle)
        if (Handle* handle = find(fd)) pump(*handle);
}

FrameReader::Sink Loop::sink_of(const Handle& handle) {
    const uint32_t link = handle.stream->link();
    return {[this, link](const Frame& frame) { return engine_.judge(link, frame); },
            [this, link](PacketPtr packet) { engine_.deliver(link, std::move(packet)); }};
}

void Loop::read(Handle& handle) {
    const int fd = handle.stream->fd();
    if (handle.stream->read(sink_of(handle)) == Io::BROKEN) return close(fd, true);
    watch(handle);
}

void Loop::pump(Handle& handle) {
    Stream& stream = *handle.stream;
    stream.awaits_room = false;
    for (int frames = 0; frames < FRAMES_AT_ONCE; ++frames) {
        if (!stream.is_sending()) {
            PacketPtr packet = engine_.pick(stream.link(), stream.fd(), handle.running);
            if (packet == nullptr) return watch(handle);
            stream.put(std::move(packet));
        }
        const Io io = stream.write();
        if (io == Io::BROKEN) return close(stream.fd(), true);
        if (io == Io::BLOCKED) break;
        const size_t bytes = stream.packet()->frame.payload_bytes;
        stream.clear();
        handle.has_sent = true;
        if (handle.running == nullptr) continue;  // a beat
        handle.running->transfer->sent(handle.running->member_of(stream.link()), bytes);
        handle.running.reset();
    }
    stream.awaits_room = true;  // blocked, or its turn is over: then EPOLLOUT fires at once
    watch(handle);
}

// Updates the events that epoll reports for a stream.
void Loop::watch(Handle& handle) {
    const uint32_t in = handle.stream->reader().is_holding() ? 0 : uint32_t{EPOLLIN};
    const uint32_t events = in | (handle.stream->awaits_room ? uint32_t{EPOLLOUT} : 0);
    if (events == handle.events) return;
    handle.events = events;
    epoll_event event{};
    event.events = events;
    event.data.fd = handle.stream->fd();
    epoll_ctl(epoll_, EPOLL_CTL_MOD, handle.stream->fd(), &event);
}

void Loop::close(int fd, bool is_lost) {
    Handle* handle = find(fd);
    if (handle == nullptr) return;
    const uint32_t link = handle->stream->link();
    epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    const std::unique_ptr<Stream> stream = std::move(handle->stream);
    streams_.erase(fd);
    if (is_lost) engine_.lose_stream(link);
}

}  // namespace zeroband
