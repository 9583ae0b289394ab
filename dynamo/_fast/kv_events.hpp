// Reads KvEventBatch (dynamo.protocols.kv) from MessagePack without a copy.
//
// Strict on purpose: what this reader takes, the Python decoder takes with the same meaning. What it
// does not take may still be a batch, and is for the Python decoder to judge.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace dynamo::kv_events {

struct Slice {
    const uint8_t *data = nullptr;
    size_t size = 0;

    bool is(const char *text) const noexcept {
        return size == std::strlen(text) && std::memcmp(data, text, size) == 0;
    }
};

// MessagePack, read forwards. The first thing that does not fit makes it fail for good.
class Reader {
public:
    Reader(const uint8_t *data, size_t size) : at_(data), end_(data + size) {}

    bool failed() const noexcept { return failed_; }
    bool at_end() const noexcept { return at_ == end_; }
    size_t left() const noexcept { return static_cast<size_t>(end_ - at_); }

    size_t map() noexcept { return container(0x80, 0x8F, 0xDE, 0xDF); }
    size_t array() noexcept { return container(0x90, 0x9F, 0xDC, 0xDD); }

    Slice text() noexcept {
        uint8_t lead = byte();
        if (lead >= 0xA0 && lead <= 0xBF) return slice(lead & 0x1Fu);
        if (lead >= 0xD9 && lead <= 0xDB) return slice(big_endian(size_t{1} << (lead - 0xD9)));
        return fail(), Slice{};
    }

    Slice bytes() noexcept {
        uint8_t lead = byte();
        if (lead >= 0xC4 && lead <= 0xC6) return slice(big_endian(size_t{1} << (lead - 0xC4)));
        return fail(), Slice{};
    }

    // Any 64-bit integer by its bits; `*negative` says whether they mean a negative one.
    uint64_t integer(bool *negative) noexcept {
        uint8_t lead = byte();
        *negative = false;
        if (lead <= 0x7F) return lead;
        if (lead >= 0xCC && lead <= 0xCF) return big_endian(size_t{1} << (lead - 0xCC));
        if (lead >= 0xE0) return *negative = true, uint64_t{lead} | ~uint64_t{0xFF};
        if (lead < 0xD0 || lead > 0xD3) return fail(), 0;
        size_t size = size_t{1} << (lead - 0xD0);
        uint64_t value = big_endian(size);
        uint64_t sign = uint64_t{1} << (8 * size - 1);
        *negative = value & sign;
        return (value ^ sign) - sign;
    }

    uint64_t natural(uint64_t most) noexcept {
        bool negative;
        uint64_t value = integer(&negative);
        if (negative || value > most) fail();
        return value;
    }

    // Whether a nil comes next; then it is read.
    bool nil() noexcept {
        if (left() == 0 || *at_ != 0xC0) return false;
        at_++;
        return true;
    }

    // Passes over one value of any kind.
    void skip() noexcept {
        for (size_t values = 1; values != 0 && !failed_; values--) values += skip_head();
    }

    void fail() noexcept {
        failed_ = true;
        at_ = end_;
    }

private:
    uint8_t byte() noexcept {
        if (left() == 0) return fail(), uint8_t{0xC1};
        return *at_++;
    }

    uint64_t big_endian(size_t size) noexcept {
        if (left() < size) return fail(), 0;
        uint64_t value = 0;
        for (size_t i = 0; i < size; i++) value = value << 8 | *at_++;
        return value;
    }

    Slice slice(uint64_t size) noexcept {
        if (left() < size) return fail(), Slice{};
        Slice found{at_, static_cast<size_t>(size)};
        at_ += size;
        return found;
    }

    // Every entry takes a byte at least, so a count above the remaining bytes is invalid.
    size_t container(uint8_t first, uint8_t last, uint8_t wide16, uint8_t wide32) noexcept {
        uint8_t lead = byte();
        uint64_t count = 0;
        if (lead >= first && lead <= last) {
            count = lead - first;
        } else if (lead == wide16) {
            count = big_endian(2);
        } else if (lead == wide32) {
            count = big_endian(4);
        } else {
            fail();
        }
        if (count > left()) fail();
        return failed_ ? 0 : static_cast<size_t>(count);
    }

    // Reads a value up to the values inside it; returns how many those are.
    size_t skip_head() noexcept {
        uint8_t lead = left() == 0 ? uint8_t{0xC1} : *at_;
        if ((lead & 0xF0) == 0x80 || lead == 0xDE || lead == 0xDF) return 2 * map();
        if ((lead & 0xF0) == 0x90 || lead == 0xDC || lead == 0xDD) return array();
        byte();
        if (lead <= 0x7F || lead >= 0xE0 || lead == 0xC0 || lead == 0xC2 || lead == 0xC3) return 0;
        if (lead >= 0xA0 && lead <= 0xBF) {
            slice(lead & 0x1Fu);
        } else if (lead >= 0xC4 && lead <= 0xC6) {
            slice(big_endian(size_t{1} << (lead - 0xC4)));
        } else if (lead >= 0xD9 && lead <= 0xDB) {
            slice(big_endian(size_t{1} << (lead - 0xD9)));
        } else if (lead == 0xCA || lead == 0xCB) {
            slice(uint64_t{4} << (lead - 0xCA));
        } else if (lead >= 0xCC && lead <= 0xD3) {
            slice(uint64_t{1} << ((lead - 0xCC) % 4));
        } else {
            fail();  // extensions have no place in these messages
        }
        return 0;
    }

    const uint8_t *at_, *end_;
    bool failed_ = false;
};

enum Kind : uint8_t { STORED, REMOVED, CLEARED, KINDS };

inline constexpr uint8_t UNKNOWN_TIER = 0xFF;

struct Event {
    int64_t id = 0;
    uint64_t parent_hash = 0;
    Slice block_hashes, tokens_hashes;
    uint32_t dp_rank = 0;
    Kind kind = CLEARED;
    uint8_t tier = 0;
    bool has_parent = false;
};

struct Batch {
    uint64_t worker = 0;
    std::vector<Event> events;
};

class BatchReader {
public:
    BatchReader(const uint8_t *data, size_t size) : in_(data, size) {}

    // False if this is no batch, or an unusual one. The events point into the data.
    bool read(Batch *batch) {
        batch->events.clear();
        unsigned seen = 0;
        for (size_t fields = in_.map(); fields != 0 && !in_.failed(); fields--) {
            Slice name = in_.text();
            if (name.is("worker_id")) {
                once(&seen, 1);
                batch->worker = in_.natural(UINT64_MAX);
            } else if (name.is("events")) {
                once(&seen, 2);
                for (size_t left = in_.array(); left != 0 && !in_.failed(); left--) {
                    batch->events.emplace_back();
                    read_event(&batch->events.back());
                }
            } else {
                in_.skip();
            }
        }
        return !in_.failed() && in_.at_end() && seen == 3;
    }

private:
    void once(unsigned *seen, unsigned bit) noexcept {
        if (*seen & bit) in_.fail();
        *seen |= bit;
    }

    void read_event(Event *event) noexcept {
        unsigned seen = 0;
        for (size_t fields = in_.map(); fields != 0 && !in_.failed(); fields--) {
            Slice name = in_.text();
            if (name.is("event_id")) {
                once(&seen, 1);
                event->id = static_cast<int64_t>(in_.natural(INT64_MAX >> 1));
            } else if (name.is("data")) {
                once(&seen, 2);
                read_data(event);
            } else if (name.is("dp_rank")) {
                once(&seen, 4);
                event->dp_rank = static_cast<uint32_t>(in_.natural(UINT32_MAX));
            } else if (name.is("storage_tier")) {
                once(&seen, 8);
                event->tier = tier(in_.text());
            } else {
                in_.skip();
            }
        }
        if ((seen & 3) != 3) in_.fail();
    }

    // The kind comes first, as our publishers write it.
    void read_data(Event *event) noexcept {
        size_t fields = in_.map();
        if (fields == 0 || !in_.text().is("kind")) return in_.fail();
        Slice kind = in_.text();
        unsigned seen = 0, needed = 0;
        if (kind.is("stored")) {
            event->kind = STORED;
            needed = 3;
        } else if (kind.is("removed")) {
            event->kind = REMOVED;
            needed = 1;
        } else if (!kind.is("cleared")) {
            return in_.fail();
        }
        while (--fields != 0 && !in_.failed()) read_field(event, &seen);
        if ((seen & needed) != needed) in_.fail();
    }

    void read_field(Event *event, unsigned *seen) noexcept {
        const bool stored = event->kind == STORED;
        Slice name = in_.text();
        if (name.is("kind")) {
            in_.fail();
        } else if (event->kind != CLEARED && name.is("block_hashes")) {
            once(seen, 1);
            event->block_hashes = in_.bytes();
        } else if (stored && name.is("tokens_hashes")) {
            once(seen, 2);
            event->tokens_hashes = in_.bytes();
        } else if (stored && name.is("parent_hash")) {
            once(seen, 4);
            bool negative;
            event->has_parent = !in_.nil();
            if (event->has_parent) event->parent_hash = in_.integer(&negative);
        } else if (stored && name.is("start_position")) {
            once(seen, 8);
            bool negative;
            if (!in_.nil()) in_.integer(&negative);
        } else {
            in_.skip();
        }
    }

    uint8_t tier(Slice name) noexcept {
        static constexpr const char *NAMES[] = {"device", "host_pinned", "disk", "external"};
        for (uint8_t tier = 0; tier < 4; tier++)
            if (name.is(NAMES[tier])) return tier;
        for (size_t i = 0; i < name.size; i++)
            if (name.data[i] >= 0x80) in_.fail();  // may be no UTF-8
        return UNKNOWN_TIER;
    }

    Reader in_;
};

}  // namespace dynamo::kv_events
