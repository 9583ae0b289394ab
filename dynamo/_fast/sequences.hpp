// The blocks and prompt tokens that running requests hold on each slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace dynamo {

// Counts the owners of each hash, and names the owner of a hash that has only one: the XOR of all
// owners' numbers is then that owner's. Open addressing, linear probing, 16 bytes an entry;
// deletion shifts entries back, so no tombstones remain. The multiplier is random per process:
// clients choose the tokens, but cannot aim at one bucket.
class HashCounts {
  public:
    explicit HashCounts(uint64_t multiplier) : multiplier_(multiplier | 1) {}

    size_t size() const { return size_; }
    size_t memory_bytes() const { return entries_.capacity() * sizeof(Entry); }

    // Makes room for `extra` more hashes, so that the following add() calls cannot fail.
    void reserve(size_t extra) {
        size_t wanted = size_ + extra, capacity = entries_.empty() ? 16 : entries_.size();
        while (wanted * 4 > capacity * 3) capacity *= 2;
        if (capacity != entries_.size()) rebuild(capacity);
    }

    // The number of owners of a hash, and with 1 its owner.
    struct Held {
        uint32_t count = 0, owner = 0;
    };

    // Returns the entry as it was before.
    Held add(uint64_t hash, uint32_t owner) noexcept {
        Entry &entry = entries_[find(hash)];
        Held before{entry.count, entry.owners};
        if (entry.count++ == 0) {
            entry.hash = hash;
            entry.owners = owner;
            size_++;
        } else {
            entry.owners ^= owner;
        }
        return before;
    }

    // Returns the entry as it is afterwards.
    Held drop(uint64_t hash, uint32_t owner) noexcept {
        if (size_ == 0) return {};
        size_t at = find(hash);
        if (entries_[at].count == 0) return {};
        Entry &entry = entries_[at];
        entry.owners ^= owner;
        if (--entry.count > 0) return {entry.count, entry.owners};
        size_--;
        close_gap(at);
        return {};
    }

    uint32_t count(uint64_t hash) const noexcept {
        return size_ == 0 ? 0 : entries_[find(hash)].count;
    }

    void clear() {
        entries_ = std::vector<Entry>();
        size_ = 0;
    }

  private:
    struct Entry {
        uint64_t hash = 0;
        uint32_t count = 0;  // 0: the place is empty
        uint32_t owners = 0;
    };

    size_t home(uint64_t hash) const noexcept { return (hash * multiplier_) >> shift_; }

    size_t find(uint64_t hash) const noexcept {
        size_t mask = entries_.size() - 1, at = home(hash);
        while (entries_[at].count != 0 && entries_[at].hash != hash) at = (at + 1) & mask;
        return at;
    }

    void close_gap(size_t hole) noexcept {
        size_t mask = entries_.size() - 1;
        for (size_t at = (hole + 1) & mask; entries_[at].count != 0; at = (at + 1) & mask) {
            size_t distance = (at - home(entries_[at].hash)) & mask;
            if (distance >= ((at - hole) & mask)) {
                entries_[hole] = entries_[at];
                hole = at;
            }
        }
        entries_[hole].count = 0;
    }

    void rebuild(size_t capacity) {
        std::vector<Entry> old(capacity);
        old.swap(entries_);
        shift_ = 64;
        for (size_t room = capacity; room > 1; room /= 2) shift_--;
        for (const Entry &entry : old)
            if (entry.count != 0) entries_[find(entry.hash)] = entry;
    }

    std::vector<Entry> entries_;
    size_t size_ = 0;
    unsigned shift_ = 63;
    uint64_t multiplier_;
};

// Running requests by handle and their sums by slot. A handle is (generation << 32 | place), so
// that the handle of an ended request never matches a later request in the same place.
class Sequences {
  public:
    static constexpr uint32_t kMaxSlots = 65536;

    explicit Sequences(uint64_t multiplier) : multiplier_(multiplier) {}

    uint64_t book(uint32_t slot, const uint64_t *hashes, size_t count, int64_t unique,
                  int64_t prefill) {
        if (slot >= kMaxSlots) throw std::out_of_range("slot is beyond 65535");
        while (slots_.size() <= slot) slots_.emplace_back(multiplier_);
        if (free_.empty()) {
            requests_.emplace_back();
            free_.push_back(static_cast<uint32_t>(requests_.size() - 1));
        }
        uint32_t place = free_.back();
        Request &request = requests_[place];
        request.hashes.assign(hashes, hashes + count);
        Slot &target = slots_[slot];
        target.held.reserve(count);
        free_.pop_back();
        request.single = unique;
        for (size_t i = 0; i < count; i++) {
            HashCounts::Held before = target.held.add(hashes[i], place);
            if (before.count == 0) request.single++;
            if (before.count == 1) share(target, requests_[before.owner], -1);
        }
        request.slot = slot;
        request.unique = unique;
        request.prefill = prefill;
        request.faded = 0;
        request.live = true;
        target.unique += unique;
        target.prefill += prefill;
        target.requests++;
        return static_cast<uint64_t>(request.generation) << 32 | place;
    }

    bool end_prefill(uint64_t handle) noexcept {
        Request *request = live(handle);
        if (request == nullptr) return false;
        slots_[request->slot].prefill -= request->prefill;
        request->prefill = 0;
        return true;
    }

    // Adds `blocks` of output; `faded` in 0..1 is the share of its single-owner blocks that the
    // request is expected not to need for long any more.
    bool grow(uint64_t handle, int64_t blocks, double faded) noexcept {
        Request *request = live(handle);
        if (request == nullptr) return false;
        Slot &slot = slots_[request->slot];
        request->unique += blocks;
        slot.unique += blocks;
        slot.faded -= request->faded * request->single;
        request->single += blocks;
        request->faded = static_cast<int64_t>(faded * kWhole + 0.5);
        slot.faded += request->faded * request->single;
        return true;
    }

    bool release(uint64_t handle) {
        Request *request = live(handle);
        if (request == nullptr) return false;
        free_.push_back(static_cast<uint32_t>(handle));  // first: the only step that can fail
        end(static_cast<uint32_t>(handle));
        return true;
    }

    size_t clear(uint32_t slot) {
        size_t ended = 0;
        for (size_t place = 0; place < requests_.size(); place++) {
            if (!requests_[place].live || requests_[place].slot != slot) continue;
            free_.push_back(static_cast<uint32_t>(place));
            end(static_cast<uint32_t>(place));
            ended++;
        }
        if (slot < slots_.size()) slots_[slot].held.clear();
        return ended;
    }

    size_t slots() const noexcept { return slots_.size(); }
    int64_t prefill(size_t slot) const noexcept { return slots_[slot].prefill; }
    int64_t requests(size_t slot) const noexcept { return slots_[slot].requests; }

    int64_t blocks(size_t slot) const noexcept {
        const Slot &sums = slots_[slot];
        int64_t whole = static_cast<int64_t>(sums.held.size()) + sums.unique;
        return whole - (sums.faded + kWhole / 2 - 1) / kWhole;  // halves count
    }

    // How many of the chained hashes are held on the slot. Held ones form a prefix (a request
    // that holds hash i holds all before it), so this gallops: O(log count).
    size_t depth(size_t slot, const uint64_t *hashes, size_t count) const noexcept {
        const HashCounts &held = slots_[slot].held;
        if (count == 0 || held.count(hashes[0]) == 0) return 0;
        size_t low = 1, high = 1;
        while (high < count && held.count(hashes[high]) != 0) {
            low = high + 1;
            high *= 2;
        }
        if (high > count) high = count;
        while (low < high) {
            size_t middle = low + (high - low) / 2;
            if (held.count(hashes[middle]) != 0) low = middle + 1;
            else high = middle;
        }
        return low;
    }

    size_t memory_bytes() const noexcept {
        size_t bytes = slots_.capacity() * sizeof(Slot) + requests_.capacity() * sizeof(Request);
        for (const Slot &slot : slots_) bytes += slot.held.memory_bytes();
        for (const Request &request : requests_) bytes += request.hashes.capacity() * 8;
        return bytes + free_.capacity() * sizeof(uint32_t);
    }

    // The name of the first broken invariant, or nullptr.
    const char *broken() const {
        size_t live = 0;
        for (const Request &request : requests_) live += request.live;
        if (live + free_.size() != requests_.size()) return "a place is neither live nor free";
        for (size_t slot = 0; slot < slots_.size(); slot++) {
            Slot sums(multiplier_);
            const Slot &kept = slots_[slot];
            for (size_t place = 0; place < requests_.size(); place++) {
                const Request &request = requests_[place];
                if (!request.live || request.slot != slot) continue;
                int64_t single = request.unique;
                sums.held.reserve(request.hashes.size());
                for (uint64_t hash : request.hashes) {
                    sums.held.add(hash, static_cast<uint32_t>(place));
                    if (kept.held.count(hash) == 0) return "a held block is not counted";
                    single += kept.held.count(hash) == 1;
                }
                if (single != request.single) return "single-owner blocks do not add up";
                sums.unique += request.unique;
                sums.prefill += request.prefill;
                sums.requests++;
                sums.faded += request.faded * request.single;
            }
            if (sums.held.size() != kept.held.size()) return "a block is counted, but not held";
            if (sums.unique != kept.unique) return "unique blocks do not add up";
            if (sums.prefill != kept.prefill) return "prefill tokens do not add up";
            if (sums.requests != kept.requests) return "requests do not add up";
            if (sums.faded != kept.faded) return "faded blocks do not add up";
        }
        return nullptr;
    }

  private:
    // `single`: blocks that no other request on the slot holds, unique ones among them; of each of these
    // `faded` / kWhole does not count. Whole numbers, so that the sums stay exact.
    struct Request {
        std::vector<uint64_t> hashes;
        int64_t prefill = 0, unique = 0, single = 0, faded = 0;
        uint32_t slot = 0, generation = 0;
        bool live = false;
    };

    struct Slot {
        explicit Slot(uint64_t multiplier) : held(multiplier) {}
        HashCounts held;
        int64_t prefill = 0, unique = 0, requests = 0, faded = 0;
    };

    static constexpr int64_t kWhole = int64_t{1} << 24;

    Request *live(uint64_t handle) noexcept {
        size_t place = static_cast<uint32_t>(handle);
        if (place >= requests_.size()) return nullptr;
        Request &request = requests_[place];
        return request.live && request.generation == handle >> 32 ? &request : nullptr;
    }

    // Count a hash that the request now owns alone (1), or no longer owns alone (-1).
    void share(Slot &slot, Request &request, int64_t change) noexcept {
        request.single += change;
        slot.faded += change * request.faded;
    }

    void end(uint32_t place) noexcept {
        Request &request = requests_[place];
        Slot &slot = slots_[request.slot];
        slot.faded -= request.faded * request.single;
        request.faded = 0;
        for (uint64_t hash : request.hashes) {
            HashCounts::Held left = slot.held.drop(hash, place);
            if (left.count == 1) share(slot, requests_[left.owner], 1);
        }
        slot.prefill -= request.prefill;
        slot.unique -= request.unique;
        slot.requests--;
        request.live = false;
        request.generation++;
        request.hashes.clear();
    }

    std::vector<Slot> slots_;
    std::vector<Request> requests_;
    std::vector<uint32_t> free_;
    uint64_t multiplier_;
};

}  // namespace dynamo
