/* The forms of JSON as parts of an automaton. Between tokens there is at most one space, behind ':'
 * and ',' only; numbers have at most 18 digits, 17 behind the point and 2 in the exponent. */
#ifndef TEXT_JSONFORM_H
#define TEXT_JSONFORM_H

#include "text/automaton.h"

/* The rules that all schemas of an automaton share, + 1; 0: not built. */
struct jsonform {
    struct automaton *a;
    uint32_t any, string, character, number, object;
    bool no_tags; /* strings spell no tags of calls (rawform.h): the values stand in one */
};

/* One optional space, one byte: return the node behind. */
uint32_t jsonform_space(struct automaton *a, uint32_t from);
uint32_t jsonform_step(struct automaton *a, uint32_t from, uint8_t lo, uint8_t hi);

/* From behind the opening quote to `end`, min..max characters (max < 0: any number). */
void jsonform_string_body(struct jsonform *b, uint32_t from, uint32_t end, long min, long max);
/* Members "key": value from `key` (behind '{' or ','), each of rule `value`, up to '}'. */
void jsonform_members(struct jsonform *b, uint32_t key, uint32_t end, uint32_t value);
/* A list: rules first[0..first_count), then `item`; max < 0: any number. */
void jsonform_items(struct jsonform *b, uint32_t from, uint32_t end, const uint32_t *first,
                    size_t first_count, uint32_t item, long min, long max);
/* Integers low..high, within -JSONFORM_MAX..JSONFORM_MAX. */
#define JSONFORM_MAX INT64_C(999999999999999999)
void jsonform_range(struct automaton *a, uint32_t from, uint32_t end, int64_t low, int64_t high);
/* true, false and null, as far as types (enum values_type) has them. */
void jsonform_words(struct automaton *a, uint32_t from, uint32_t end, unsigned types);

/* Rules: any string, a number, an object of any members, any value. */
uint32_t jsonform_string(struct jsonform *b);
uint32_t jsonform_number(struct jsonform *b, bool whole, bool positive);
uint32_t jsonform_free_object(struct jsonform *b);
uint32_t jsonform_any(struct jsonform *b);

#endif
