# Calla. No configure step: `make` builds build/calla with the backends that this platform has.
#
#   make                 build/calla
#   make test            every test, short forms; ends with "N passed, N failed, N skipped"
#   make test-long       the same tests at their full counts (CALLA_SOAK_SECONDS=1800 for a longer soak)
#   make metal-check     on a Mac: every Metal op against the reference, then its speed
#   make lint format     checks of style and layers; reformat
#   make SAN=1 ...       address and undefined-behaviour sanitizers, into build/san/
#   make SAN=thread ...  the thread sanitizer, into build/tsan/
#   make CUDA=0 ...      leave the CUDA backend out although nvcc is there
#   make metal-emulated  on Linux: calla and kcheck with the Metal backend over tests/metal, for
#                        tests, into build/emu/ (needs clang 19 and libobjc)
#   make V=1 ...         show the commands

UNAME := $(shell uname -s)
ARCH := $(shell uname -m)
SAN ?= 0
ifeq ($(SAN),1)
B := build/san
else ifeq ($(SAN),thread)
B := build/tsan
else
B := build
endif

CC ?= cc
PKG_CONFIG ?= pkg-config
PKGS := jansson libutf8proc libmicrohttpd
TEST_PKGS := cmocka libpcre2-8
# macOS has these itself; SHA-256 is in its libc.
ifeq ($(UNAME),Darwin)
LDLIBS += -ledit -lcurl
else
PKGS += libedit libcurl nettle
endif
CPPFLAGS += -Isrc -I$(B)/gen -D_GNU_SOURCE $(shell $(PKG_CONFIG) --cflags $(PKGS))
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla
CFLAGS += -std=c11 -O2 -g -fno-omit-frame-pointer -ffp-contract=off -pthread $(WARN)
LDFLAGS += -pthread
LDLIBS += $(shell $(PKG_CONFIG) --libs $(PKGS)) -lm
ifeq ($(SAN),1)
CFLAGS += -fsanitize=address,undefined -fno-sanitize-recover=all
LDFLAGS += -fsanitize=address,undefined
else ifeq ($(SAN),thread)
CFLAGS += -fsanitize=thread
LDFLAGS += -fsanitize=thread
# Kernels of a level share nothing but what the pool, which is watched, hands them; watched too, they
# are 20 times slower, and a server has little traffic.
UNWATCHED := -fno-sanitize=thread
endif

# Sources. cmd/ is the program; all the rest is the library that tests link too.
LIB_SRC := $(wildcard src/base/*.c src/backend/*.c src/backend/cpu/ref_*.c src/backend/cpu/cpu*.c \
             src/model/*.c src/text/*.c src/engine/*.c src/server/*.c)
ifneq ($(filter x86_64 amd64,$(ARCH)),)
LIB_SRC += $(wildcard src/backend/cpu/avx2_*.c src/backend/cpu/avx512_*.c)
endif
ifneq ($(filter aarch64 arm64,$(ARCH)),)
LIB_SRC += $(wildcard src/backend/cpu/neon_*.c src/backend/cpu/i8mm_*.c)
endif
# CUDA: built when nvcc is there; the program runs without a GPU or driver all the same.
NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA ?= $(if $(NVCC),$(if $(filter 1 thread,$(SAN)),0,1),0)
CUDA_SRC :=
ifeq ($(CUDA),1)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(NVCC))
CUDA_SRC := $(wildcard src/backend/cuda/*.cu)
CPPFLAGS += -DCALLA_CUDA
LDLIBS += -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt
# Code for compute capability 8.0 and 9.0, and 8.0's intermediate form for all that is newer.
NVCCFLAGS += -std=c++17 -O3 -Isrc -Xcompiler -Wall,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics -diag-suppress 177 \
             -gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90a,code=sm_90a
endif
CMD_SRC := $(wildcard src/cmd/*.c)
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o) $(CUDA_SRC:%.cu=$(B)/%.o) $(B)/gen/page.o
# The order matters: the kernels' text is one text.
METAL_TEXT := $(addprefix src/backend/metal/,dims.h common.h rows.h embed.metal linear.metal \
                delta.metal attention.metal route.metal moe.metal sample.metal)
METAL_TENSOR_TEXT := $(addprefix src/backend/metal/,dims.h common.h tensor.h linear_tensor.metal moe_tensor.metal)
METAL_OBJ := $(patsubst %,%.o,$(basename $(wildcard src/backend/metal/*.m src/backend/metal/*.c)))
ifeq ($(UNAME),Darwin)
OBJC ?= $(CC)
OBJCFLAGS += -O2 -g -fobjc-arc -fblocks -Wall
CPPFLAGS += -DCALLA_METAL
LIB_OBJ += $(addprefix $(B)/,$(METAL_OBJ) gen/metal_source.o)
LDLIBS += -framework Foundation -framework Metal
endif
# The same files on Linux, over the emulator and its stub of the Metal framework.
EMU := build/emu
EMU_OBJ := $(addprefix $(EMU)/,src/backend/device.o $(METAL_OBJ) gen/metal_source.o tests/metal/stub/metal_stub.o) \
             $(patsubst %.c,$(EMU)/%.o,$(wildcard tests/metal/runtime/*.c))
EMU_TOOLS := $(and $(filter Linux-x86_64,$(UNAME)-$(ARCH)),$(shell command -v clang-19 2>/dev/null), \
               $(wildcard /usr/lib/gcc/x86_64-linux-gnu/*/libobjc.so))
CMD_OBJ := $(CMD_SRC:%.c=$(B)/%.o)
UNIT_SRC := $(wildcard tests/unit/test_*.c)
UNIT_BIN := $(UNIT_SRC:tests/unit/%.c=$(B)/tests/%)
KCHECK_SRC := $(wildcard tests/kcheck/*.c)
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_BIN := $(FUZZ_SRC:tests/fuzz/%.c=$(B)/tests/%)

# One line a file; V=1 shows the commands.
ifeq ($(V),1)
say =
Q :=
else
say = @echo "  $(1) $(patsubst $(B)/%,%,$@)"
Q := @
endif

all: $(B)/calla

$(B)/calla: $(CMD_OBJ) $(B)/libcalla.a
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# Changes when the backends do: what names them, and the library that holds them, are made again.
$(B)/gen/backends: always
	@mkdir -p $(@D)
	@echo 'CUDA=$(CUDA)' | cmp -s - $@ || echo 'CUDA=$(CUDA)' >$@

$(B)/src/backend/device.o: $(B)/gen/backends

$(B)/libcalla.a: $(LIB_OBJ) $(B)/gen/backends
	@rm -f $@
	$(call say,AR  )
	$(Q)$(AR) rcs $@ $(filter %.o,$^)

# Kernels of a level are compiled for that level; the level is chosen at run time.
# (gcc 12 for Arm ends in an internal error when it vectorises ref_moe.c.)
REF_O3 := -O3 $(if $(filter aarch64 arm64,$(ARCH)),-fno-tree-vectorize)
$(B)/src/backend/cpu/ref_%.o $(B)/src/backend/cpu/cpu_weight.o: CFLAGS += $(REF_O3)
$(B)/src/backend/cpu/avx2_%.o: CFLAGS += -mavx2 -mfma -O3 $(UNWATCHED)
$(B)/src/backend/cpu/avx512_%.o: CFLAGS += -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -O3 $(UNWATCHED)
$(B)/src/backend/cpu/neon_%.o: CFLAGS += -march=armv8.2-a+dotprod -O3 $(UNWATCHED)
$(B)/src/backend/cpu/i8mm_%.o: CFLAGS += -march=armv8.2-a+dotprod+i8mm -O3 $(UNWATCHED)

$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC  )
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(B)/%.o: %.cu
	@mkdir -p $(@D)
	$(call say,NVCC)
	$(Q)$(NVCC) $(NVCCFLAGS) -MMD -MP -c -o $@ $<

$(B)/%.o: %.m
	@mkdir -p $(@D)
	$(call say,OBJC)
	$(Q)$(OBJC) $(CPPFLAGS) $(OBJCFLAGS) -MMD -MP -c -o $@ $<

# The kernels are compiled on the machine that runs them. Their text is bytes of the library.
metal_array = echo 'const char $(1)[] = {'; \
	for f in $(2); do echo "\#line 1 \"$$f\""; sed '/^\#include "/s/.*//' $$f; done | \
	od -An -v -tx1 | sed 's/ *\([0-9a-f][0-9a-f]\)/0x\1,/g'; echo '0};';
$(B)/gen/metal_source.c: $(METAL_TEXT) $(METAL_TENSOR_TEXT)
	@mkdir -p $(@D)
	$(call say,GEN )
	$(Q){ echo '#include "backend/metal/internal.h"'; $(call metal_array,metal_source,$(METAL_TEXT)) \
		$(call metal_array,metal_tensor_source,$(METAL_TENSOR_TEXT)) } >$@.part && mv $@.part $@

$(B)/gen/metal_source.o: $(B)/gen/metal_source.c
	$(call say,CC  )
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

# What differs from the plain build in front of its library.
$(EMU)/calla: $(CMD_OBJ) $(EMU_OBJ) $(B)/libcalla.a
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) -rdynamic -o $@ $^ $(LDLIBS) -lobjc -ldl

$(EMU)/kcheck: $(KCHECK_SRC:%.c=$(B)/%.o) $(EMU_OBJ) $(B)/libcalla.a
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) -rdynamic -o $@ $^ $(LDLIBS) -lobjc -ldl

$(EMU)/src/%.o: src/%.c
	@mkdir -p $(@D)
	$(call say,CC  )
	$(Q)$(CC) $(filter-out -DCALLA_CUDA,$(CPPFLAGS)) -DCALLA_METAL $(CFLAGS) -MMD -MP -c -o $@ $<

$(EMU)/gen/%.o: $(B)/gen/%.c
	@mkdir -p $(@D)
	$(call say,CC  )
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -c -o $@ $<

$(EMU)/tests/%.o: tests/%.c
	@mkdir -p $(@D)
	$(call say,CC  )
	$(Q)clang-19 -std=c11 -D_GNU_SOURCE -O2 -g -Wall -Wextra -MMD -MP -c -o $@ $<

# @available is decided by the compiler; for the tests the stub decides.
$(EMU)/%.o: %.m
	@mkdir -p $(@D)
	$(call say,OBJC)
	$(Q){ echo '#line 1 "$<"'; \
		sed 's/@available(macOS \([0-9]*\)\.\([0-9]*\), \*)/emu_system_is(\1, \2)/' $<; } >$(@:.o=.emu.m)
	$(Q)clang-19 -Isrc -D_GNU_SOURCE -O1 -g -fobjc-runtime=gcc -fblocks -Wall -Itests/metal/stub \
		-Itests/metal/runtime -DEMU_FOLDER=$(CURDIR)/tests/metal -MMD -MP -c -o $@ $(@:.o=.emu.m)

# The chat page is bytes of the library: od and sed are everywhere that make is.
$(B)/gen/page.c: web/index.html
	@mkdir -p $(@D)
	$(call say,GEN )
	$(Q){ echo '#include "server/page.h"'; echo 'const unsigned char page_html[] = {'; \
		od -An -v -tx1 $< | sed 's/ *\([0-9a-f][0-9a-f]\)/0x\1,/g'; \
		echo '};'; echo 'const size_t page_html_len = sizeof page_html;'; } >$@.part && mv $@.part $@

$(B)/gen/page.o: $(B)/gen/page.c
	$(call say,CC  )
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(B)/tests/test_%: tests/unit/test_%.c $(B)/libcalla.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) $(CPPFLAGS) -Itests/unit $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(B)/libcalla.a $(LDLIBS) \
		$(shell $(PKG_CONFIG) --cflags --libs $(TEST_PKGS))

# On a runtime of its own, with CUDA's types.
ifeq ($(CUDA),1)
$(B)/tests/test_cuda_host: CPPFLAGS += -isystem $(CUDA_HOME)/include
endif

$(B)/tests/fuzz_%: tests/fuzz/fuzz_%.c $(B)/libcalla.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(B)/libcalla.a $(LDLIBS)

$(B)/kcheck: $(KCHECK_SRC:%.c=$(B)/%.o) $(B)/libcalla.a
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# kcheck for Arm, to run under qemu-aarch64: a static program of the backend alone, no library.
ARM_CC ?= aarch64-linux-gnu-gcc
HAVE_ARM_CC := $(if $(filter x86_64 amd64,$(ARCH)),$(if $(wildcard /usr/aarch64-linux-gnu/include/stdio.h),\
               $(shell command -v $(ARM_CC) 2>/dev/null)))
ARM := build/arm64
ARM_SRC := $(KCHECK_SRC) src/base/err.c src/base/mem.c src/base/pool.c $(wildcard src/backend/*.c src/backend/cpu/cpu*.c \
             src/backend/cpu/ref_*.c src/backend/cpu/neon_*.c src/backend/cpu/i8mm_*.c)
ARM_OBJ := $(ARM_SRC:%.c=$(ARM)/%.o)
ARM_FLAGS := -Isrc -D_GNU_SOURCE -std=c11 -O2 -ffp-contract=off -pthread $(WARN)
$(ARM)/src/backend/cpu/neon_%.o: ARM_FLAGS += -march=armv8.2-a+dotprod -O3
$(ARM)/src/backend/cpu/i8mm_%.o: ARM_FLAGS += -march=armv8.2-a+dotprod+i8mm -O3

$(ARM)/%.o: %.c
	@mkdir -p $(@D)
	$(call say,ARM )
	$(Q)$(ARM_CC) $(ARM_FLAGS) -MMD -MP -c -o $@ $<

$(ARM)/kcheck: $(ARM_OBJ)
	$(call say,LINK)
	$(Q)$(ARM_CC) -static -pthread -o $@ $^ -lm

kcheck-arm64: $(ARM)/kcheck
kcheck: $(B)/kcheck
metal-check: $(B)/kcheck
	tools/metal_check.sh $(B)/kcheck

metal-emulated: $(EMU)/calla $(EMU)/kcheck
tests: all $(UNIT_BIN) $(FUZZ_BIN) $(if $(KCHECK_SRC),$(B)/kcheck) \
	$(if $(HAVE_ARM_CC),$(ARM)/kcheck) $(if $(filter 0,$(SAN)),$(if $(EMU_TOOLS),metal-emulated))

# The sanitizer build runs the unit tests and the fuzzers; the plain build runs everything.
test: tests lint
	$(MAKE) SAN=1 tests
	python3 tests/run.py

test-long: tests lint
	$(MAKE) SAN=1 tests
	$(MAKE) SAN=thread all
	python3 tests/run.py --long

demo: all
	tools/demo.sh $(B)/calla

lint:
	tools/lint.py

format:
	clang-format -i $$(git ls-files '*.c' '*.h')

clean:
	rm -rf build

.PHONY: all always kcheck kcheck-arm64 metal-check metal-emulated tests test test-long demo lint format clean
-include $(LIB_OBJ:.o=.d) $(CMD_OBJ:.o=.d) $(wildcard $(B)/tests/*.d) $(KCHECK_SRC:%.c=$(B)/%.d) $(ARM_OBJ:.o=.d) \
         $(EMU_OBJ:.o=.d)
