/* Compiles HLSL by Microsoft's compilers, as wgpu does: dxcompiler.dll for shader model 6, d3dcompiler_47.dll for 5.1.
 * No header of theirs is needed: objects are called through their tables of functions, in the order that dxcapi.h and d3dcompiler.h declare.
 *
 *     hlsl.exe LIST FIRST STEP      lines FIRST, FIRST + STEP ... of LIST: file, entry point, profile, more, by tabs
 *
 * DXC compiles each twice: as it is by default, and with -Od, as wgpu does in a debug build. An optimiser hides what a kernel should not
 * ask for, such as doubles.
 *
 * Prints a line each, by tabs: number of the line, `ok` or `FAILED`, seconds, bytes, registers and instructions (FXC only), the feature
 * flags (part SFI0) of the container and, with -Od, of the other, in hexadecimal, then, where it failed, the compiler's message with its
 * line ends as ` | `. Status 0 if it ran to the end.
 */
#include <windows.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { uint32_t a; uint16_t b, c; uint8_t d[8]; } Guid;
static const Guid CLSID_COMPILER = {0x73e22d93, 0xe6ce, 0x47f3, {0xb5, 0xbf, 0xf0, 0x66, 0x4f, 0x39, 0xc1, 0xb0}};
static const Guid IID_COMPILER = {0x8c210bf3, 0x011f, 0x4422, {0x8d, 0x70, 0x6f, 0x9a, 0xcb, 0x8d, 0xb6, 0x17}};
static const Guid CLSID_LIBRARY = {0x6245d6af, 0x66e0, 0x48fd, {0x80, 0xb4, 0x4d, 0x27, 0x17, 0x96, 0x74, 0x8c}};
static const Guid IID_LIBRARY = {0xe5204dc7, 0xd18c, 0x4c3c, {0xbd, 0xfb, 0x85, 0x16, 0x73, 0x98, 0x0f, 0xe7}};

typedef HRESULT(__stdcall *Create)(const Guid *, const Guid *, void **);
typedef HRESULT(__stdcall *D3DCompile)(const void *, SIZE_T, const char *, const void *, void *, const char *, const char *, UINT, UINT, void **, void **);
typedef HRESULT(__stdcall *D3DDisassemble)(const void *, SIZE_T, UINT, const char *, void **);

/* Function `at` of a COM object. */
static void *function(void *object, int at) { return (*(void ***)object)[at]; }
static void release(void *object) { if (object) ((ULONG(__stdcall *)(void *))function(object, 2))(object); }
/* Of an ID3DBlob or IDxcBlob. */
static char *bytes(void *blob) { return ((char *(__stdcall *)(void *))function(blob, 3))(blob); }
static size_t size(void *blob) { return ((SIZE_T(__stdcall *)(void *))function(blob, 4))(blob); }

typedef struct { int ok; size_t bytes; int registers, instructions; uint64_t flags, flags_unoptimised; char message[2000]; } Result;

/* What a container of DXIL asks of a device, from its part SFI0; 0 without one. Its header has the number of parts at byte 28, then their
 * offsets; a part has its name, its size and its data. */
static uint64_t flags(void *blob) {
    const char *data = bytes(blob);
    const size_t end = size(blob);
    uint32_t parts = 0, at = 0;
    uint64_t found = 0;
    if (end < 32) return 0;
    memcpy(&parts, data + 28, 4);
    for (uint32_t i = 0; i < parts && 36 + 4 * (size_t)i <= end; i++) {
        memcpy(&at, data + 32 + 4 * i, 4);
        if ((size_t)at + 16 <= end && !memcmp(data + at, "SFI0", 4)) memcpy(&found, data + at + 8, 8);
    }
    return found;
}

static void keep(Result *result, void *blob) {
    if (!blob) return;
    /* From the first error on: FXC puts its warnings before. */
    int length = (int)size(blob);
    const char *text = bytes(blob), *error = strstr(text, "error");
    if (!error) error = text;
    snprintf(result->message, sizeof result->message, "%.*s", length - (int)(error - text), error);
    for (char *c = result->message; *c; c++) if (*c == '\n' || *c == '\r' || *c == '\t') *c = '|';
}

static Result fxc(const char *text, size_t length, const char *name, const char *entry, const char *profile) {
    static D3DCompile compile;
    static D3DDisassemble disassemble;
    Result result = {0};
    if (!compile) {
        HMODULE library = LoadLibraryA("d3dcompiler_47.dll");
        if (!library) { strcpy(result.message, "no d3dcompiler_47.dll"); return result; }
        compile = (D3DCompile)(void *)GetProcAddress(library, "D3DCompile");
        disassemble = (D3DDisassemble)(void *)GetProcAddress(library, "D3DDisassemble");
    }
    void *code = NULL, *error = NULL, *listing = NULL;
    const UINT enable_strictness = 1 << 11;
    result.ok = compile(text, length, name, NULL, NULL, entry, profile, enable_strictness, 0, &code, &error) >= 0 && code;
    keep(&result, error);
    if (result.ok) {
        result.bytes = size(code);
        if (disassemble(bytes(code), size(code), 0, NULL, &listing) >= 0) {
            const char *found = strstr(bytes(listing), "dcl_temps ");
            if (found) sscanf(found, "dcl_temps %d", &result.registers);
            found = strstr(bytes(listing), "// Approximately ");
            if (found) sscanf(found, "// Approximately %d", &result.instructions);
        }
    }
    release(code), release(error), release(listing);
    return result;
}

static Result dxc_once(const char *text, size_t length, const char *name, const char *entry, const char *profile, int optimised) {
    static void *library, *compiler;
    Result result = {0};
    if (!compiler) {
        HMODULE dll = LoadLibraryA("dxcompiler.dll");
        if (!dll) { strcpy(result.message, "no dxcompiler.dll"); return result; }
        Create create = (Create)(void *)GetProcAddress(dll, "DxcCreateInstance");
        if (create(&CLSID_LIBRARY, &IID_LIBRARY, &library) || create(&CLSID_COMPILER, &IID_COMPILER, &compiler)) {
            strcpy(result.message, "DxcCreateInstance failed");
            return result;
        }
    }
    void *source = NULL, *done = NULL, *code = NULL, *error = NULL;
    const UINT utf8 = 65001;
    ((HRESULT(__stdcall *)(void *, const void *, UINT32, UINT32, void **))function(library, 6))(library, text, (UINT32)length, utf8, &source);
    WCHAR wide[3][300];
    const char *narrow[] = {name, entry, profile};
    for (int i = 0; i < 3; i++) MultiByteToWideChar(CP_UTF8, 0, narrow[i], -1, wide[i], 300);
    /* wgpu's options; 16-bit types are from 6.2 on. */
    const WCHAR *options[6] = {L"-HV", L"2018", L"-no-warnings", L"-Ges"};
    UINT32 count = 4;
    if (strcmp(profile, "cs_6_2") >= 0) options[count++] = L"-enable-16bit-types";
    if (!optimised) options[count++] = L"-Od";
    HRESULT status = E_FAIL;
    ((HRESULT(__stdcall *)(void *, void *, const WCHAR *, const WCHAR *, const WCHAR *, const WCHAR **, UINT32, void *, UINT32, void *, void **))
         function(compiler, 3))(compiler, source, wide[0], wide[1], wide[2], options, count, NULL, 0, NULL, &done);
    if (done) {
        ((HRESULT(__stdcall *)(void *, HRESULT *))function(done, 3))(done, &status);
        ((HRESULT(__stdcall *)(void *, void **))function(done, 4))(done, &code);
        ((HRESULT(__stdcall *)(void *, void **))function(done, 5))(done, &error);
    }
    result.ok = status >= 0 && code && size(code) > 0;
    if (result.ok) result.bytes = size(code), result.flags = flags(code);
    else keep(&result, error);
    release(source), release(done), release(code), release(error);
    return result;
}

static Result dxc(const char *text, size_t length, const char *name, const char *entry, const char *profile) {
    Result result = dxc_once(text, length, name, entry, profile, 1);
    if (!result.ok) return result;
    Result unoptimised = dxc_once(text, length, name, entry, profile, 0);
    if (!unoptimised.ok) return unoptimised;
    result.flags_unoptimised = unoptimised.flags;
    return result;
}

int main(int count, char **words) {
    if (count != 4) { fprintf(stderr, "hlsl.exe LIST FIRST STEP\n"); return 2; }
    FILE *list = fopen(words[1], "r");
    if (!list) { fprintf(stderr, "no %s\n", words[1]); return 2; }
    static char line[4096], text[1 << 22];
    LARGE_INTEGER frequency, begin, end;
    QueryPerformanceFrequency(&frequency);
    int next = atoi(words[2]), step = atoi(words[3]);
    for (int at = 0; fgets(line, sizeof line, list); at++) {
        if (at != next) continue;
        next += step;
        char *name = strtok(line, "\t"), *entry = strtok(NULL, "\t"), *profile = strtok(NULL, "\t\r\n");
        FILE *file = profile ? fopen(name, "rb") : NULL;
        if (!file) { printf("%d\tFAILED\t0\t0\t0\t0\t0\t0\tno such file\n", at); continue; }
        size_t length = fread(text, 1, sizeof text, file);
        fclose(file);
        QueryPerformanceCounter(&begin);
        Result result = (profile[3] == '5' ? fxc : dxc)(text, length, name, entry, profile);
        QueryPerformanceCounter(&end);
        printf("%d\t%s\t%.2f\t%zu\t%d\t%d\t%llx\t%llx\t%s\n", at, result.ok ? "ok" : "FAILED", (double)(end.QuadPart - begin.QuadPart) / frequency.QuadPart,
               result.bytes, result.registers, result.instructions, (unsigned long long)result.flags,
               (unsigned long long)result.flags_unoptimised, result.ok ? "" : result.message);
        fflush(stdout);
    }
    return 0;
}
