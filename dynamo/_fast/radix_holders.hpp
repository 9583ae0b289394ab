// A node of the prefix index and the set of slots that hold it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynamo::radix {

inline constexpr uint32_t ROOT = 0;
inline constexpr uint32_t NO_NODE = 0;          // no node: 0 is the root, which is no node's child
inline constexpr uint32_t WIDE = 0x80000000u;  // in `where`: the holders are a chain of words
inline constexpr uint32_t SLOTS_PER_WORD = 64;

// 32 bytes, two in a cache line. Most nodes have one child and holders among 64 slots: both are
// written here. Further children are found through one table, further holders in a pool of words.
struct Node {
    uint64_t tokens_hash = 0;
    uint64_t mask = 0;        // narrow: the holders, as bits of the 64 slots of group `where`
    uint32_t parent = ROOT;
    uint32_t child = NO_NODE;  // one of the children; in a free node the next free one
    uint32_t others = 0;       // number of children that are in the table instead
    uint32_t where = 0;        // narrow: group of slots; wide: WIDE | first word of the chain
};
static_assert(sizeof(Node) == 32);

// 64 slots' worth of a wide node's holders. Chains are sorted by group and have no empty word.
struct Word {
    uint64_t mask;
    uint32_t group;
    uint32_t next;  // 0 ends the chain; word 0 is never used
};

// Reads and changes the holders of nodes; owns the words of the wide ones.
class Holders {
public:
    Holders() { reset(); }

    size_t words_in_use() const noexcept { return live_; }
    size_t memory_bytes() const noexcept { return words_.capacity() * sizeof(Word); }

    void reset() {
        words_ = std::vector<Word>();
        words_.push_back(Word{0, 0, 0});
        free_ = 0;
    }

    // Makes sure that the next hold() succeeds. Throws std::bad_alloc otherwise.
    void make_room() {
        if (words_.capacity() - words_.size() < 2)
            words_.reserve(words_.size() + words_.size() / 4 + 16);
    }

    static bool is_empty(const Node &node) noexcept {
        return node.mask == 0 && !(node.where & WIDE);
    }

    bool holds(const Node &node, uint32_t slot) const noexcept {
        return Reader(*this, node).mask(slot / SLOTS_PER_WORD) >> slot % SLOTS_PER_WORD & 1;
    }

    // Adds a holder that is not one yet. Room must have been made.
    void hold(Node &node, uint32_t slot) noexcept {
        uint32_t group = slot / SLOTS_PER_WORD;
        uint64_t bit = uint64_t{1} << slot % SLOTS_PER_WORD;
        if (!(node.where & WIDE)) {
            if (node.mask == 0) node.where = group;
            if (node.where == group) {
                node.mask |= bit;
                return;
            }
            node.where = WIDE | new_word(node.mask, node.where, 0);
            node.mask = 0;
        }
        hold_wide(node, group, bit);
    }

    // Takes a holder away, if it is one. The node itself stays.
    void drop(Node &node, uint32_t slot) noexcept {
        uint32_t group = slot / SLOTS_PER_WORD;
        uint64_t bit = uint64_t{1} << slot % SLOTS_PER_WORD;
        if (node.where & WIDE) {
            drop_wide(node, group, bit);
        } else if (node.where == group) {
            node.mask &= ~bit;
        }
    }

    // Reads the holders of one node group by group; groups must be asked for in rising order.
    class Reader {
    public:
        Reader(const Holders &holders, const Node &node) : words_(holders.words_.data()) {
            if (node.where & WIDE) {
                next_ = node.where & ~WIDE;
            } else {
                only_ = Word{node.mask, node.where, 0};
            }
        }

        uint64_t mask(uint32_t group) noexcept {
            if (next_ == 0) return only_.group == group ? only_.mask : 0;
            while (words_[next_].group < group && words_[next_].next != 0)
                next_ = words_[next_].next;
            return words_[next_].group == group ? words_[next_].mask : 0;
        }

        template <class Visit>
        void each(Visit visit) const {
            if (next_ == 0) {
                if (only_.mask != 0) visit(only_);
                return;
            }
            for (uint32_t at = next_; at != 0; at = words_[at].next) visit(words_[at]);
        }

    private:
        const Word *words_;
        Word only_{0, 0, 0};
        uint32_t next_ = 0;
    };

private:
    uint32_t new_word(uint64_t mask, uint32_t group, uint32_t next) noexcept {
        live_++;
        if (free_ == 0) {
            words_.push_back(Word{mask, group, next});
            return static_cast<uint32_t>(words_.size() - 1);
        }
        uint32_t word = free_;
        free_ = words_[word].next;
        words_[word] = Word{mask, group, next};
        return word;
    }

    void give_back_word(uint32_t word) noexcept {
        words_[word] = Word{0, 0, free_};
        free_ = word;
        live_--;
    }

    void hold_wide(Node &node, uint32_t group, uint64_t bit) noexcept {
        uint32_t before = 0, at = node.where & ~WIDE;
        while (at != 0 && words_[at].group < group) {
            before = at;
            at = words_[at].next;
        }
        if (at != 0 && words_[at].group == group) {
            words_[at].mask |= bit;
        } else {
            uint32_t word = new_word(bit, group, at);
            (before == 0 ? node.where : words_[before].next) = before == 0 ? WIDE | word : word;
        }
    }

    void drop_wide(Node &node, uint32_t group, uint64_t bit) noexcept {
        uint32_t before = 0, at = node.where & ~WIDE;
        while (at != 0 && words_[at].group < group) {
            before = at;
            at = words_[at].next;
        }
        if (at == 0 || words_[at].group != group) return;
        words_[at].mask &= ~bit;
        if (words_[at].mask != 0) return;
        uint32_t next = words_[at].next;
        (before == 0 ? node.where : words_[before].next) = before == 0 ? WIDE | next : next;
        give_back_word(at);
        narrow_if_single(node);
    }

    void narrow_if_single(Node &node) noexcept {
        uint32_t only = node.where & ~WIDE;
        if (words_[only].next != 0) return;
        node.mask = words_[only].mask;
        node.where = words_[only].group;
        give_back_word(only);
    }

    std::vector<Word> words_;
    uint32_t free_ = 0;  // head of the list of unused words
    size_t live_ = 0;
};

}  // namespace dynamo::radix
