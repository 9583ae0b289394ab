// The nodes of the prefix index: one per distinct token prefix that some slot holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "ordered_table.hpp"

namespace dynamo::radix {

inline constexpr uint32_t ROOT = 0;
inline constexpr uint32_t NOBODY = 0;            // no such node; the root is nobody's child
inline constexpr uint32_t FREE = 0xFFFFFFFFu;    // in `parent`: the node is in the free list
inline constexpr uint32_t WIDE = 0x80000000u;    // in `where`: the holders are a chain of words
inline constexpr uint32_t SLOTS_PER_WORD = 64;

// An odd multiplier that differs per process: clients choose tokens, and with a known one could
// choose them so that all their blocks share one home in a table.
inline uint64_t process_multiplier() {
    static const uint64_t multiplier = [] {
        std::random_device device;
        return (uint64_t{device()} << 32 | device()) | 1;
    }();
    return multiplier;
}

// 32 bytes, two in a cache line. Most nodes have one child and holders among 64 slots: both are
// written here. Further children are found through one table, further holders in a pool of words.
struct Node {
    uint64_t tokens_hash = 0;
    uint64_t mask = 0;       // narrow: the holders, as bits of the 64 slots of group `where`
    uint32_t parent = ROOT;
    uint32_t child = NOBODY;  // one of the children; in a free node the next free one
    uint32_t others = 0;      // number of children that are in the table instead
    uint32_t where = 0;       // narrow: group of slots; wide: WIDE | first word of the chain
};
static_assert(sizeof(Node) == 32);

// 64 slots' worth of a wide node's holders. Chains are sorted by group and have no empty word.
struct Word {
    uint64_t mask;
    uint32_t group;
    uint32_t next;  // 0 ends the chain; word 0 is never used
};

class Nodes {
public:
    Nodes() : multiplier_(process_multiplier()) { start(); }

    Node &operator[](uint32_t node) noexcept { return chunks_[node / CHUNK][node % CHUNK]; }
    const Node &operator[](uint32_t node) const noexcept {
        return chunks_[node / CHUNK][node % CHUNK];
    }

    // Nodes besides the root.
    size_t size() const noexcept { return live_; }
    uint32_t end() const noexcept { return fresh_; }
    size_t words_in_use() const noexcept { return words_live_; }

    size_t memory_bytes() const noexcept {
        return chunks_.size() * CHUNK * sizeof(Node) +
               chunks_.capacity() * sizeof(std::unique_ptr<Node[]>) +
               words_.capacity() * sizeof(Word) + siblings_.memory_bytes();
    }

    uint32_t find_child(uint32_t parent, uint64_t tokens_hash) const noexcept {
        const Node &node = (*this)[parent];
        if (node.child != NOBODY && (*this)[node.child].tokens_hash == tokens_hash)
            return node.child;
        return node.others == 0 ? NOBODY : find_sibling(parent, tokens_hash);
    }

    // Makes sure that the next create() and hold() succeed. Throws std::bad_alloc otherwise.
    void make_room() {
        siblings_.make_room();
        if (free_ == NOBODY && fresh_ == chunks_.size() * CHUNK)
            chunks_.push_back(std::make_unique<Node[]>(CHUNK));
        if (words_.capacity() - words_.size() < 2)
            words_.reserve(words_.size() + words_.size() / 4 + 16);
    }

    // A new child without holders. Room must have been made.
    uint32_t create(uint32_t parent, uint64_t tokens_hash) noexcept {
        uint32_t child = take();
        Node &node = (*this)[child];
        node = Node{};
        node.tokens_hash = tokens_hash;
        node.parent = parent;
        Node &above = (*this)[parent];
        if (above.child == NOBODY) {
            above.child = child;
        } else {
            uint32_t key = tag(parent, tokens_hash);
            siblings_.insert(siblings_.seek(key), key, child);
            above.others++;
        }
        return child;
    }

    // Frees the node and then its ancestors as long as nobody holds them and nothing hangs below.
    void prune(uint32_t node) noexcept {
        while (node != ROOT && is_idle((*this)[node])) {
            uint32_t parent = (*this)[node].parent;
            unlink(node);
            give_back(node);
            node = parent;
        }
        if (live_ == 0) start();
    }

    bool holds(uint32_t node, uint32_t slot) const noexcept {
        return HolderWords(*this, node).mask(slot / SLOTS_PER_WORD) >> slot % SLOTS_PER_WORD & 1;
    }

    // Adds a holder that is not one yet. Room must have been made.
    void hold(uint32_t node_id, uint32_t slot) noexcept {
        Node &node = (*this)[node_id];
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

    // Takes a holder away, if it is one. The node stays; see prune().
    void drop(uint32_t node_id, uint32_t slot) noexcept {
        Node &node = (*this)[node_id];
        uint32_t group = slot / SLOTS_PER_WORD;
        uint64_t bit = uint64_t{1} << slot % SLOTS_PER_WORD;
        if (node.where & WIDE) {
            drop_wide(node, group, bit);
        } else if (node.where == group) {
            node.mask &= ~bit;
        }
    }

    // Reads the holders of one node group by group; groups must be asked for in rising order.
    class HolderWords {
    public:
        HolderWords(const Nodes &nodes, uint32_t node_id) : words_(nodes.words_.data()) {
            const Node &node = nodes[node_id];
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

    using Siblings = OrderedTable<uint32_t, 4>;

    const Siblings &siblings() const noexcept { return siblings_; }

private:
    static constexpr uint32_t CHUNK = 4096;

    static bool is_idle(const Node &node) noexcept {
        return node.mask == 0 && !(node.where & WIDE) && node.child == NOBODY && node.others == 0;
    }

    // An empty tree owns one chunk and nothing else.
    void start() {
        chunks_.resize(chunks_.empty() ? 0 : 1);
        if (chunks_.empty()) chunks_.push_back(std::make_unique<Node[]>(CHUNK));
        chunks_.shrink_to_fit();
        chunks_[0][ROOT] = Node{};
        fresh_ = 1;
        free_ = NOBODY;
        siblings_.reset();
        words_ = std::vector<Word>();
        words_.push_back(Word{0, 0, 0});
        words_free_ = 0;
    }

    uint32_t tag(uint32_t parent, uint64_t tokens_hash) const noexcept {
        uint64_t mixed = (tokens_hash ^ tokens_hash >> 32) + uint64_t{parent} * 0x9E3779B97F4A7C15u;
        return static_cast<uint32_t>((mixed * multiplier_) >> 32);
    }

    uint32_t find_sibling(uint32_t parent, uint64_t tokens_hash) const noexcept {
        uint32_t wanted = tag(parent, tokens_hash);
        const auto *at = siblings_.seek(wanted);
        for (; at != nullptr && at->value != 0 && at->key == wanted; at++) {
            const Node &node = (*this)[at->value];
            if (node.parent == parent && node.tokens_hash == tokens_hash) return at->value;
        }
        return NOBODY;
    }

    void unlink(uint32_t child) noexcept {
        const Node &node = (*this)[child];
        Node &above = (*this)[node.parent];
        if (above.child == child) {
            above.child = NOBODY;
            return;
        }
        auto *at = siblings_.seek(tag(node.parent, node.tokens_hash));
        while (at->value != child) at++;
        siblings_.erase(at);
        above.others--;
    }

    uint32_t take() noexcept {
        live_++;
        if (free_ == NOBODY) return fresh_++;
        uint32_t node = free_;
        free_ = (*this)[node].child;
        return node;
    }

    void give_back(uint32_t node) noexcept {
        (*this)[node].parent = FREE;
        (*this)[node].child = free_;
        free_ = node;
        live_--;
    }

    uint32_t new_word(uint64_t mask, uint32_t group, uint32_t next) noexcept {
        words_live_++;
        if (words_free_ == 0) {
            words_.push_back(Word{mask, group, next});
            return static_cast<uint32_t>(words_.size() - 1);
        }
        uint32_t word = words_free_;
        words_free_ = words_[word].next;
        words_[word] = Word{mask, group, next};
        return word;
    }

    void give_back_word(uint32_t word) noexcept {
        words_[word] = Word{0, 0, words_free_};
        words_free_ = word;
        words_live_--;
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

    uint64_t multiplier_;
    std::vector<std::unique_ptr<Node[]>> chunks_;
    uint32_t fresh_ = 1;      // nodes from here on have never been used
    uint32_t free_ = NOBODY;  // head of the free list
    size_t live_ = 0;
    Siblings siblings_;  // tag(parent, tokens hash) -> child that is not inline
    std::vector<Word> words_;
    uint32_t words_free_ = 0;
    size_t words_live_ = 0;
};

}  // namespace dynamo::radix
