/* Owns nothing. The schemas of properties are shared with the document: each is built once. */
#include "text/merge.h"

#include "text/word.h"

#include <string.h>

enum { MERGE_DEPTH = 16 /* of allOf and $ref */ };

static bool merge_properties(struct schema_build *b, json_t *merged, const json_t *more)
{
    json_t *all = json_object_get(merged, "properties"), *value;
    const char *key;
    if (!json_is_object(more))
        return schema_refuse(b, "properties", "must be an object");
    json_object_foreach((json_t *)more, key, value)
    {
        const json_t *have = json_object_get(all, key);
        if (have && !json_equal(have, value))
            return schema_refuse(b, "allOf",
                                 "has two parts that say different things of one "
                                 "property; state it once");
        if (!have)
            json_object_set(all, key, value);
    }
    return true;
}

static bool merge_part(struct schema_build *b, json_t *merged, const json_t *part, int depth);

static bool merge_key(struct schema_build *b, json_t *merged, const char *key, json_t *value,
                      int depth)
{
    static const char *const notes[] = {
        "title", "description", "default", "examples", "example",     "$schema",  "$comment",
        "$id",   "deprecated",  "$defs",   "readOnly", "definitions", "writeOnly"};
    for (size_t i = 0; i < sizeof notes / sizeof *notes; i++)
        if (!strcmp(key, notes[i]))
            return true;
    if (!strcmp(key, "properties"))
        return merge_properties(b, merged, value);
    if (!strcmp(key, "required") && json_is_array(value)) {
        json_array_extend(json_object_get(merged, key), value);
        return true;
    }
    if ((!strcmp(key, "type") && word_is(value, "object")) ||
        (!strcmp(key, "additionalProperties") && json_is_true(value)))
        return true;
    if (!strcmp(key, "$ref")) {
        const json_t *target = schema_find(b, word_text(value));
        return target ? merge_part(b, merged, target, depth + 1)
                      : schema_refuse(b, key, "must lead to a place in the same document (#/...)");
    }
    for (size_t i = 0; !strcmp(key, "allOf") && i < json_array_size(value); i++)
        if (!merge_part(b, merged, json_array_get(value, i), depth + 1))
            return false;
    return !strcmp(key, "allOf") ||
           schema_refuse(b, key,
                         "is not supported in allOf of several parts: they must be objects "
                         "of properties");
}

static bool merge_part(struct schema_build *b, json_t *merged, const json_t *part, int depth)
{
    const char *key;
    json_t *value;
    if (!json_is_object(part) || depth > MERGE_DEPTH)
        return schema_refuse(b, "allOf", "must be a list of objects, at most 16 deep");
    json_object_foreach((json_t *)part, key, value)
    {
        if (!merge_key(b, merged, key, value, depth))
            return false;
    }
    return true;
}

json_t *merge_objects(struct schema_build *b, const json_t *schema)
{
    json_t *merged = json_pack("{s:s, s:{}, s:[]}", "type", "object", "properties", "required");
    if (merge_part(b, merged, schema, 0))
        return merged;
    json_decref(merged);
    return NULL;
}
