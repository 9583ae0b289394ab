// A hash table that keeps its entries in hash order: open addressing, linear probing, sorted runs.
//
// Why sorted: a search for an absent key ends at the first greater one, so the table may be 85 %
// full; and growing is one sequential pass, so it may grow by a third instead of doubling. Both
// keep the memory of an index of millions of blocks close to what its entries need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace dynamo {

// `Key` is u32 or u64 and must already be mixed: its high bits choose the place. Values are never
// zero; a zero value marks a free place. Keys may repeat if the caller can distinguish them. A full
// table grows by one GROWTH-th: fewer passes or less memory.
template <class Key, size_t GROWTH = 3>
class OrderedTable {
public:
    struct __attribute__((packed, aligned(4))) Entry {
        Key key;
        uint32_t value;
    };

    OrderedTable() = default;
    OrderedTable(const OrderedTable &) = delete;
    OrderedTable &operator=(const OrderedTable &) = delete;
    OrderedTable(OrderedTable &&other) noexcept { swap(other); }
    ~OrderedTable() { std::free(entries_); }

    void swap(OrderedTable &other) noexcept {
        std::swap(entries_, other.entries_);
        std::swap(homes_, other.homes_);
        std::swap(places_, other.places_);
        std::swap(size_, other.size_);
        std::swap(full_, other.full_);
        std::swap(scarce_, other.scarce_);
    }

    size_t size() const noexcept { return size_; }
    size_t memory_bytes() const noexcept { return places_ * sizeof(Entry); }

    // Entries in key order, free places among them: visit those with a value.
    const Entry *begin() const noexcept { return entries_; }
    const Entry *end() const noexcept { return entries_ + places_; }

    // The first entry of `key`; without one, an entry of another key or a free place.
    // Equal keys follow each other. Null before the first allocation.
    Entry *seek(Key key) const noexcept {
        if (entries_ == nullptr) return nullptr;
        Entry *at = entries_ + home(key);
        while (at->value != 0 && at->key < key) at++;
        return at;
    }

    // The only entry of `key`, or null. For tables whose keys do not repeat.
    Entry *find(Key key) const noexcept {
        Entry *at = seek(key);
        return is_at(at, key) ? at : nullptr;
    }

    // Whether what seek(key) found is an entry of `key`.
    static bool is_at(const Entry *found, Key key) noexcept {
        return found != nullptr && found->value != 0 && found->key == key;
    }

    void prefetch(Key key) const noexcept {
        if (entries_ == nullptr) return;
        const Entry *at = entries_ + home(key);
        __builtin_prefetch(at, 1);
        __builtin_prefetch(at + 6, 1);  // the run may go on in the next cache line
    }

    // Makes sure that one insert() succeeds. Throws std::bad_alloc and changes nothing otherwise.
    void make_room() {
        if (size_ >= full_ || entries_[places_ - 2].value != 0) make_more_room();
    }

    // Whether `count` inserts fit, unless they all fall at the very end of the table.
    bool has_room(size_t count) const noexcept { return size_ + count <= full_; }

    // A copy in which they have: for a table that must not change while it grows.
    OrderedTable grown(size_t count) const {
        size_t homes = homes_;
        do homes += homes / GROWTH + MIN_HOMES;
        while (size_ + count > full_at(homes));
        return rebuilt(homes, TAIL);
    }

    // `at` is what seek(key) found, after room was made. Later entries of the run move one on.
    void insert(Entry *at, Key key, uint32_t value) noexcept {
        Entry moving{key, value};
        for (; at->value != 0; at++) std::swap(*at, moving);
        *at = moving;
        size_++;
    }

    // Closes the gap at once (no tombstones); gives memory back when few entries are left.
    void erase(Entry *at) noexcept {
        for (Entry *next = at + 1; next->value != 0 && entries_ + home(next->key) != next; next++)
            *at++ = *next;
        at->value = 0;
        if (--size_ < scarce_) shrink();
    }

    void reset() noexcept {
        std::free(entries_);
        entries_ = nullptr;
        homes_ = places_ = size_ = full_ = scarce_ = 0;
    }

    // What is wrong with the table itself, or null.
    const char *complaint() const noexcept {
        size_t found = 0;
        const Entry *last = nullptr;
        for (const Entry *at = begin(); at != end(); at++) {
            if (at->value == 0) continue;
            const Entry *ideal = entries_ + home(at->key);
            if (at < ideal) return "an entry lies before its home";
            for (const Entry *way = ideal; way != at; way++)
                if (way->value == 0) return "a free place lies between an entry and its home";
            if (last != nullptr && last->key > at->key) return "entries are out of order";
            last = at;
            found++;
        }
        if (found != size_) return "the size differs from the entries";
        if (places_ != 0 && entries_[places_ - 1].value != 0) return "the last place is taken";
        return nullptr;
    }

private:
    static constexpr size_t MIN_HOMES = 16;
    static constexpr size_t TAIL = 16;  // places behind the last home; the very last stays free

    // Order-preserving: a greater key never has a smaller home.
    size_t home(Key key) const noexcept {
        if constexpr (sizeof(Key) == 8) {
            return static_cast<size_t>((static_cast<unsigned __int128>(key) * homes_) >> 64);
        } else {
            return static_cast<size_t>((static_cast<uint64_t>(key) * homes_) >> 32);
        }
    }

    static Entry *allocate(size_t places) noexcept {
        return static_cast<Entry *>(std::calloc(places, sizeof(Entry)));
    }

    __attribute__((noinline)) void make_more_room() {
        if (size_ >= full_) rebuild(homes_ + homes_ / GROWTH + MIN_HOMES, TAIL);
        while (entries_[places_ - 2].value != 0) rebuild(homes_, (places_ - homes_) * 2);
    }

    static size_t full_at(size_t homes) noexcept { return homes * 17 / 20; }

    void rebuild(size_t homes, size_t tail) {
        OrderedTable next = rebuilt(homes, tail);
        swap(next);
    }

    OrderedTable rebuilt(size_t homes, size_t tail) const {
        OrderedTable next;
        next.entries_ = allocate(homes + tail);
        if (next.entries_ == nullptr) throw std::bad_alloc();
        next.homes_ = homes;
        next.places_ = homes + tail;
        next.full_ = full_at(homes);
        next.scarce_ = homes > MIN_HOMES * 4 ? homes / 4 : 0;
        return next.take_from(*this) ? std::move(next) : rebuilt(homes, tail * 2);
    }

    __attribute__((noinline)) void shrink() noexcept {
        try {
            rebuild(size_ + size_ / 2 + MIN_HOMES, TAIL);
        } catch (const std::bad_alloc &) {
            // The larger table serves as well.
        }
    }

    // One sequential pass; false if the last run does not fit before the place that stays free.
    bool take_from(const OrderedTable &other) noexcept {
        Entry *next_free = entries_, *last = entries_ + places_ - 1;
        for (const Entry *from = other.begin(); from != other.end(); from++) {
            if (from->value == 0) continue;
            Entry *ideal = entries_ + home(from->key);
            Entry *at = ideal > next_free ? ideal : next_free;
            if (at >= last) return false;
            *at = *from;
            next_free = at + 1;
        }
        size_ = other.size_;
        return true;
    }

    Entry *entries_ = nullptr;
    size_t homes_ = 0;   // places that keys can call home
    size_t places_ = 0;  // homes and tail
    size_t size_ = 0;
    size_t full_ = 0;    // the table grows at this size
    size_t scarce_ = 0;  // and shrinks below this one
};

}  // namespace dynamo
