// A thread that receives KV events and applies them, without Python. See docs/radix.md.
#pragma once

#include <poll.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ingest.hpp"

namespace dynamo::ingest {

// The part of libzmq's C interface that is used here, at the addresses at which the Python binding's
// own library has it; a message is its opaque 64 bytes.
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

    // `addresses`: of the functions in the order above.
    void load(const uintptr_t *addresses) noexcept {
        poll = reinterpret_cast<decltype(poll)>(addresses[0]);
        connect = reinterpret_cast<decltype(connect)>(addresses[1]);
        disconnect = reinterpret_cast<decltype(disconnect)>(addresses[2]);
        init = reinterpret_cast<decltype(init)>(addresses[3]);
        receive = reinterpret_cast<decltype(receive)>(addresses[4]);
        data = reinterpret_cast<decltype(data)>(addresses[5]);
        size = reinterpret_cast<decltype(size)>(addresses[6]);
        more = reinterpret_cast<decltype(more)>(addresses[7]);
        close = reinterpret_cast<decltype(close)>(addresses[8]);
        error = reinterpret_cast<decltype(error)>(addresses[9]);
        set = reinterpret_cast<decltype(set)>(addresses[10]);
    }
};

// What one thread works on: a subscribing socket of its own, an inbox that others fill, and orders.
// Only run() is for the thread itself.
class Thread {
public:
    Thread(Streams *streams, std::string topic) : streams_(*streams), topic_(std::move(topic)) {}

    // Before run().
    void use(void *socket, const uintptr_t *zmq) noexcept {
        socket_ = socket;
        zmq_.load(zmq);
    }

    void connect(std::string address) { order(Order{Order::CONNECT, 0, std::move(address)}); }
    void disconnect(std::string address, uint64_t publisher) {
        order(Order{Order::DISCONNECT, publisher, std::move(address)});
    }
    void stop() { order(Order{Order::STOP, 0, {}}); }

    // A payload that came another way; false if the inbox is full.
    bool push(const char *data, size_t size) {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            if (inbox_bytes_ + size > MAX_INBOX_BYTES) return streams_.count(OVERFLOWED), false;
            inbox_bytes_ += size;
            inbox_.emplace_back(data, size);
            if (inbox_.size() > 1) return true;
        }
        bell_.ring();
        return true;
    }

    uint64_t received() const noexcept { return received_; }

    // Until stop(), or until the socket's context ends. What was pushed before stop() is done then.
    void run() {
        for (stopping_ = false; !stopping_;) {
            if (!wait()) return;
            // zmq_poll takes the first frame of a message off its pipe. Read the rest before obey():
            // zmq_disconnect drops the pipe, and the next read would abort the process.
            if (socket_ != nullptr && !drain()) return;
            obey();
            take_inbox();  // after obey(): what was pushed before stop() is there
        }
    }

private:
    static constexpr int MESSAGES_PER_TURN = 256;
    static constexpr size_t MAX_INBOX_BYTES = 64u << 20;

    struct Order {
        enum { CONNECT, DISCONNECT, STOP } what;
        uint64_t publisher;
        std::string address;
    };

    void order(Order order) {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            orders_.push_back(std::move(order));
        }
        bell_.ring();
    }

    // For a message or the bell; at once if the last turn ended before the socket was empty.
    bool wait() {
        if (busy_) return true;
        if (socket_ == nullptr) {
            pollfd bell{bell_.descriptor(), POLLIN, 0};
            return ::poll(&bell, 1, -1) >= 0 || errno == EINTR;
        }
        Zmq::PollItem items[] = {{socket_, 0, 1, 0}, {nullptr, bell_.descriptor(), 1, 0}};
        return zmq_.poll(items, 2, -1) >= 0 || zmq_.error() == EINTR;
    }

    void obey() {
        bell_.silence();
        std::deque<Order> orders;
        {
            std::lock_guard<std::mutex> hold(mutex_);
            orders.swap(orders_);
        }
        for (const Order &order : orders) {
            if (order.what == Order::STOP) {
                stopping_ = true;
            } else if (order.what == Order::CONNECT) {
                int numeric = order.address.find('[') != std::string::npos;
                zmq_.set(socket_, Zmq::IPV6, &numeric, sizeof numeric);
                if (zmq_.connect(socket_, order.address.c_str()) != 0) streams_.count(FAILED);
            } else {
                zmq_.disconnect(socket_, order.address.c_str());
                expected_.erase(order.publisher);
            }
        }
    }

    void take_inbox() {
        std::deque<std::string> inbox;
        {
            std::lock_guard<std::mutex> hold(mutex_);
            inbox.swap(inbox_);
            inbox_bytes_ = 0;
        }
        for (const std::string &payload : inbox)
            process(reinterpret_cast<const uint8_t *>(payload.data()), payload.size());
    }

    // False if the context ended.
    bool drain() {
        for (int count = 0; count < MESSAGES_PER_TURN; count++) {
            int frames = receive();
            if (frames < 0) {
                busy_ = false;
                return frames == -EAGAIN || frames == -EINTR;
            }
            if (frames != FRAMES || !take_message()) streams_.count(FOREIGN);
        }
        return busy_ = true;
    }

    // One message into frames_; returns how many frames it has, or the error, negated.
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
    bool take_message() {
        if (frames_[1].size() != 8 || frames_[2].size() != 8 || frames_[3].size() < 5) return false;
        const auto *packed = reinterpret_cast<const uint8_t *>(frames_[3].data());
        size_t size = frames_[3].size() - 5;
        if (packed[0] != 1 || big_endian(packed + 1, 4) != size) return false;
        kv_events::Slice payload;
        if (!open_envelope(packed + 5, size, &payload)) return false;
        if (frames_[0] != topic_) return true;
        received_++;
        const char *publisher = frames_[1].data(), *sequence = frames_[2].data();
        attempt([&] { note(big_endian(publisher, 8), big_endian(sequence, 8)); });
        process(payload.data, payload.size);
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

    // Messages that a publisher numbered and that did not come; ids of events tell which those are.
    void note(uint64_t publisher, uint64_t sequence) {
        // The first message of a publisher only says where its numbers stand.
        uint64_t &expected = expected_.try_emplace(publisher, sequence).first->second;
        if (sequence != expected)
            streams_.count(SEQUENCE_GAP, sequence > expected ? sequence - expected : 1);
        if (sequence < expected) streams_.renew(publisher);
        expected = sequence + 1;
    }

    // What fails here leaves the stream where it was: its next event shows that one is missing.
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
    Bell bell_;
    void *socket_ = nullptr;
    Zmq zmq_;
    bool stopping_ = false, busy_ = false;
    std::string frames_[FRAMES];
    std::unordered_map<uint64_t, uint64_t> expected_;  // publisher -> its next message
    Batch batch_;
    std::atomic<uint64_t> received_{0};

    std::mutex mutex_;  // guards what follows
    std::deque<Order> orders_;
    std::deque<std::string> inbox_;
    size_t inbox_bytes_ = 0;
};

}  // namespace dynamo::ingest
