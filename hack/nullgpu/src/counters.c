/* How often the program used the GPU. Python reads a number with ctypes: nullgpu_count(b"launches"). */
#include "nullgpu.h"

counter c_launches = {"launches"}, c_mallocs = {"mallocs"}, c_frees = {"frees"}, c_pinned = {"pinned"}, c_pinned_bytes = {"pinned_bytes"},
        c_h2d = {"h2d"}, c_h2d_bytes = {"h2d_bytes"}, c_d2h = {"d2h"}, c_d2h_bytes = {"d2h_bytes"},
        c_d2h_beside = {"d2h_beside"}, /* copies to the host on another stream than the default one */
        c_d2d = {"d2d"}, c_d2d_bytes = {"d2d_bytes"}, c_synchronisations = {"synchronisations"}, c_communicators = {"communicators"},
        c_collectives = {"collectives"}, c_sends = {"sends"}, c_receives = {"receives"},
        c_mixed = {"mixed"}, /* messages on a stream beside those of another communicator */
        c_receiving = {"receiving"}; /* the most receives that waited at once */

static counter *all[] = {&c_launches, &c_mallocs, &c_frees, &c_pinned, &c_pinned_bytes, &c_h2d, &c_h2d_bytes, &c_d2h, &c_d2h_bytes,
                         &c_d2h_beside, &c_d2d, &c_d2d_bytes, &c_synchronisations, &c_communicators, &c_collectives, &c_sends,
                         &c_receives, &c_mixed, &c_receiving};

void count(counter *c, long by) { atomic_fetch_add(&c->value, by); }

/* The count since the process started; -1 for an unknown name. */
long nullgpu_count(const char *name) {
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i]->name, name)) return atomic_load(&all[i]->value);
    return -1;
}
