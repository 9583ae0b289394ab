// What must always be true of the index. Included by radix.hpp.
#pragma once

namespace dynamo::radix {

class Auditor {
public:
    explicit Auditor(const Index &index) : index_(index), nodes_(index.nodes_), holders_(index.holders_) {}

    // The first invariant that does not hold, or an empty string. O(blocks + nodes).
    std::string complaint() {
        check_tables();
        if (complaint_.empty()) check_nodes();
        if (complaint_.empty()) check_holdings();
        return complaint_;
    }

private:
    void complain(bool wrong, const char *what, uint64_t where = 0) {
        if (wrong && complaint_.empty())
            complaint_ = std::string(what) + " (" + std::to_string(where) + ")";
    }

    void check_table(const char *wrong, const char *name) {
        if (wrong != nullptr && complaint_.empty()) complaint_ = std::string(name) + ": " + wrong;
    }

    void check_tables() {
        check_table(nodes_.siblings().complaint(), "siblings");
        check_table(index_.aliases_.complaint(), "aliases");
        for (const auto &tier : index_.held_)
            for (const auto &held : tier) check_table(held.complaint(), "held blocks");
    }

    void check_nodes() {
        const uint32_t end = nodes_.end();
        std::vector<uint32_t> children(end, 0);
        size_t live = 0, words = 0;
        for (uint32_t node = 1; node < end; node++) {
            const Node &self = nodes_[node];
            if (self.parent == FREE) continue;
            live++;
            complain(self.parent >= end || nodes_[self.parent].parent == FREE,
                     "a node hangs under a free one", node);
            if (!complaint_.empty()) return;
            children[self.parent]++;
            complain(nodes_.find_child(self.parent, self.tokens_hash) != node,
                     "a node is not a child of its parent", node);
            words += check_holders(node);
        }
        for (uint32_t node = 0; node < end; node++) {
            const Node &self = nodes_[node];
            if (node != ROOT && self.parent == FREE) continue;
            complain(children[node] != self.others + (self.child != NO_NODE),
                     "children are miscounted", node);
            complain(node != ROOT && children[node] == 0 && holders_of(node) == 0,
                     "a leaf without a holder", node);
        }
        complain(live != nodes_.size(), "live nodes are miscounted", live);
        complain(words != holders_.words_in_use(), "words leak", words);
        complain(holders_of(ROOT) != 0, "the root has holders");
    }

    // Returns the pool words that the node uses.
    size_t check_holders(uint32_t node) {
        size_t words = 0;
        int64_t last_group = -1;
        Holders::Reader(holders_, nodes_[node]).each([&](const Word &word) {
            complain(word.mask == 0, "an empty word", node);
            complain(int64_t{word.group} <= last_group, "words out of order", node);
            last_group = word.group;
            words++;
        });
        bool wide = nodes_[node].where & WIDE;
        complain(wide && words < 2, "a wide node with one word", node);
        return wide ? words : 0;
    }

    size_t holders_of(uint32_t node) const {
        size_t holders = 0;
        Holders::Reader(holders_, nodes_[node]).each([&](const Word &word) {
            holders += static_cast<size_t>(__builtin_popcountll(word.mask));
        });
        return holders;
    }

    // Every external id names a live node that its slot holds, and every holder has an id for it.
    void check_holdings() {
        size_t blocks = 0, aliases = 0, holders = 0;
        for (uint32_t tier = 0; tier < TIERS; tier++)
            for (uint32_t number = 0; number < index_.held_[tier].size(); number++)
                blocks += check_slot(tier << TIER_SHIFT | number);
        if (!complaint_.empty()) return;
        for (const auto &entry : index_.aliases_) aliases += entry.value;
        for (uint32_t node = 1; node < nodes_.end(); node++)
            if (nodes_[node].parent != FREE) holders += holders_of(node);
        complain(blocks != index_.blocks_, "blocks are miscounted", blocks);
        complain(blocks != holders + aliases, "ids and holders differ", holders);
        complain(blocks > index_.cap_ || nodes_.size() > index_.cap_, "the cap is exceeded");
    }

    // Returns how many ids the slot has.
    size_t check_slot(uint32_t slot) {
        size_t blocks = 0;
        const OrderedTable<uint64_t>::Entry *last = nullptr;
        for (const auto &entry : index_.held_of(slot)) {
            if (entry.value == 0) continue;
            blocks++;
            complain(last != nullptr && last->key == entry.key, "an id appears twice", slot);
            last = &entry;
            complain(entry.value >= nodes_.end() || nodes_[entry.value].parent == FREE,
                     "an id names a free node", slot);
            if (!complaint_.empty()) break;
            complain(!holders_.holds(nodes_[entry.value], slot), "an id whose slot is no holder", slot);
        }
        return blocks;
    }

    const Index &index_;
    const Nodes &nodes_;
    const Holders &holders_;
    std::string complaint_;
};

inline std::string Index::complaint() const { return Auditor(*this).complaint(); }

}  // namespace dynamo::radix
