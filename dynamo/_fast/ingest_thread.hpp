// A thread that receives KV events and applies them, without Python. See docs/radix.md.
#pragma once

#include <poll.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ingest.hpp"

namespace dynamo::ingest {

// The functions of libzmq that are used here, at the addresses in the library that pyzmq has loaded: a
// second copy of libzmq could not use pyzmq's sockets. A message is 64 opaque bytes, part of its ABI.
struct Zmq {
    struct alignas(16) Message {
        unsigned char opaque[64];
    };
    struct PollItem {
        void *socket;
        int descriptor;
        short events;
        short found;
    };
    int (*poll)(PollItem *, int, long) = nullptr;
    int (*connect)(void *, const char *) = nullptr;
    int (*disconnect)(void *, const char *) = nullptr;
    int (*init)(Message *) = nullptr;
    int (*receive)(Message *, void *, int) = nullptr;
    void *(*data)(Message *) = nullptr;
    size_t (*size)(const Message *) = nullptr;
    int (*more)(const Message *) = nullptr;
    int (*close)(Message *) = nullptr;
    int (*error)() = nullptr;
    int (*set)(void *, int, const void *, size_t) = nullptr;

    static constexpr int DONT_WAIT = 1, IPV6 = 42;

    // `addresses` of the functions, in the order of the members above.
    void load(const uintptr_t *addresses) noexcept {
        static_assert(sizeof(Zmq) == 11 * sizeof(uintptr_t), "one address for each function");
        std::memcpy(this, addresses, sizeof *this);
    }
};

// The state of one thread: its SUB socket, an inbox that others fill, and commands. Only the thread
// itself calls run(), and only it touches the socket: libzmq sockets are not thread-safe.
class Thread {
public:
    Thread(Streams *streams, std::string topic) : streams_(*streams), topic_(std::move(topic)) {}

    // Call before run().
    void set_socket(void *socket, const uintptr_t *zmq) noexcept {
        socket_ = socket;
        zmq_.load(zmq);
    }

    void connect(std::string address) { post(Command{Command::CONNECT, 0, std::move(address)}); }
    void disconnect(std::string address, uint64_t publisher) {
        post(Command{Command::DISCONNECT, publisher, std::move(address)});
    }
    void stop() { post(Command{Command::STOP, 0, {}}); }

    // Adds a payload that another transport received; false if the inbox is full.
    bool push(const char *data, size_t size) {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            if (inbox_bytes_ + size > MAX_INBOX_BYTES) return streams_.count(OVERFLOWED), false;
            inbox_bytes_ += size;
            inbox_.emplace_back(data, size);
            if (inbox_.size() > 1) return true;  // not taken yet: the wake-up is still pending
        }
        wakeup_.notify();
        return true;
    }

    uint64_t received() const noexcept { return received_; }

    // Runs until stop(), or until the socket's context ends. Payloads pushed before stop() are applied
    // before it returns.
    void run() {
        for (stopping_ = false; !stopping_;) {
            if (!wait()) return;
            // zmq_poll takes the first frame of a message off its pipe. Read the rest before
            // run_commands(): zmq_disconnect drops the pipe, and the next read would abort the process.
            if (socket_ != nullptr && !drain()) return;
            run_commands();
            process_inbox();  // after run_commands(): it has all that was pushed before stop()
        }
    }

private:
    static constexpr int MESSAGES_PER_ITERATION = 256;
    static constexpr size_t MAX_INBOX_BYTES = 64u << 20;

    struct Command {
        enum { CONNECT, DISCONNECT, STOP } kind;
        uint64_t publisher;
        std::string address;
    };

    void post(Command command) {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            commands_.push_back(std::move(command));
        }
        wakeup_.notify();
    }

    // Waits for a message or a wake-up; not at all if the last iteration left messages in the socket.
    bool wait() {
        if (busy_) return true;
        if (socket_ == nullptr) {
            pollfd wakeup{wakeup_.descriptor(), POLLIN, 0};
            return ::poll(&wakeup, 1, -1) >= 0 || errno == EINTR;
        }
        Zmq::PollItem items[] = {{socket_, 0, 1, 0}, {nullptr, wakeup_.descriptor(), 1, 0}};
        return zmq_.poll(items, 2, -1) >= 0 || zmq_.error() == EINTR;
    }

    void run_commands() {
        wakeup_.clear();
        std::deque<Command> commands;
        {
            std::lock_guard<std::mutex> hold(mutex_);
            commands.swap(commands_);
        }
        for (const Command &command : commands) {
            if (command.kind == Command::STOP) {
                stopping_ = true;
            } else if (command.kind == Command::CONNECT) {
                int numeric = command.address.find('[') != std::string::npos;
                zmq_.set(socket_, Zmq::IPV6, &numeric, sizeof numeric);
                if (zmq_.connect(socket_, command.address.c_str()) != 0) streams_.count(FAILED);
            } else {
                zmq_.disconnect(socket_, command.address.c_str());
                expected_.erase(command.publisher);
            }
        }
    }

    void process_inbox() {
        std::deque<std::string> inbox;
        {
            std::lock_guard<std::mutex> hold(mutex_);
            inbox.swap(inbox_);
            inbox_bytes_ = 0;
        }
        for (const std::string &payload : inbox)
            process(reinterpret_cast<const uint8_t *>(payload.data()), payload.size());
    }

    // Processes up to MESSAGES_PER_ITERATION messages; false if the context ended.
    bool drain() {
        for (int count = 0; count < MESSAGES_PER_ITERATION; count++) {
            int frames = receive();
            if (frames < 0) {
                busy_ = false;
                return frames == -EAGAIN || frames == -EINTR;
            }
            if (frames != FRAMES || !process_message()) streams_.count(MALFORMED);
        }
        return busy_ = true;
    }

    // Reads one message into frames_; returns the number of its frames, or the negated error.
    int receive() {
        int frames = 0;
        for (bool more = true; more; frames++) {
            Zmq::Message message;
            zmq_.init(&message);
            if (zmq_.receive(&message, socket_, Zmq::DONT_WAIT) < 0) {
                int error = zmq_.error();
                zmq_.close(&message);
                return -error;
            }
            if (frames < FRAMES)
                frames_[frames].assign(static_cast<const char *>(zmq_.data(&message)),
                                       zmq_.size(&message));
            more = zmq_.more(&message) != 0;
            zmq_.close(&message);
        }
        return frames;
    }

    // topic · publisher (u64be) · sequence (u64be) · 0x01 | length (u32be) | Envelope
    bool process_message() {
        if (frames_[1].size() != 8 || frames_[2].size() != 8 || frames_[3].size() < 5) return false;
        const auto *packed = reinterpret_cast<const uint8_t *>(frames_[3].data());
        size_t size = frames_[3].size() - 5;
        if (packed[0] != 1 || big_endian(packed + 1, 4) != size) return false;
        kv_events::Slice payload;
        if (!open_envelope(packed + 5, size, &payload)) return false;
        if (frames_[0] != topic_) return true;
        received_++;
        uint64_t publisher = big_endian(frames_[1].data(), 8);
        bool lost = false;
        attempt([&] { lost = track_sequence(publisher, big_endian(frames_[2].data(), 8)); });
        process(payload.data, payload.size);
        // After the message: of its own ranks it has shown what is missing.
        if (lost) attempt([&] { streams_.messages_lost(publisher); });
        return true;
    }

    static bool open_envelope(const uint8_t *data, size_t size, kv_events::Slice *payload) noexcept {
        kv_events::Reader in(data, size);
        bool found = false;
        for (size_t fields = in.map(); fields != 0 && !in.failed(); fields--) {
            if (in.text().is("payload")) {
                *payload = in.bytes();
                found = true;
            } else {
                in.skip();
            }
        }
        return found && !in.failed() && in.at_end();
    }

    template <class Byte>
    static uint64_t big_endian(const Byte *data, size_t size) noexcept {
        uint64_t value = 0;
        for (size_t i = 0; i < size; i++) value = value << 8 | static_cast<uint8_t>(data[i]);
        return value;
    }

    // Counts lost messages by the publisher's numbers; returns whether any was lost.
    bool track_sequence(uint64_t publisher, uint64_t sequence) {
        // The first message of a publisher only sets the number.
        uint64_t &next = expected_.try_emplace(publisher, sequence).first->second;
        uint64_t expected = std::exchange(next, sequence + 1);
        if (sequence != expected)
            streams_.count(SEQUENCE_GAP, sequence > expected ? sequence - expected : 1);
        if (sequence < expected) streams_.publisher_restarted(publisher);
        return sequence > expected;
    }

    // A failure (out of memory) leaves the stream unchanged: its next event reveals the gap.
    void process(const uint8_t *data, size_t size) {
        attempt([&] { streams_.process(data, size, &batch_); });
    }

    template <class Action>
    void attempt(Action action) {
        try {
            action();
        } catch (const std::exception &) {
            streams_.count(FAILED);
        }
    }

    static constexpr int FRAMES = 4;

    Streams &streams_;
    const std::string topic_;
    WakeupFd wakeup_;
    void *socket_ = nullptr;
    Zmq zmq_;
    bool stopping_ = false, busy_ = false;
    std::string frames_[FRAMES];
    std::unordered_map<uint64_t, uint64_t> expected_;  // publisher -> its next message
    Batch batch_;
    std::atomic<uint64_t> received_{0};

    std::mutex mutex_;  // guards the members below
    std::deque<Command> commands_;
    std::deque<std::string> inbox_;
    size_t inbox_bytes_ = 0;
};

}  // namespace dynamo::ingest
