//! A stand-in for NCCL's library, which records calls and fails them as it is told: what needs no card.

use std::ffi::{c_char, c_int, c_void};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::calls::{Ends, Target};
use super::comm::{Alive, Comm};
use super::library::{self, Api, Code, Config, Handle, Stream, UniqueId};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::ops::Replay;

const SHORT: Duration = Duration::from_millis(200);
/// What a test that must not hang may take.
const SOON: Duration = Duration::from_secs(20);

/// What the stand-in does, told by the first byte of the id.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(u8)]
enum Does {
    Work,
    /// No other rank ever comes.
    NeverJoin,
    /// The join blocks, as it does for blocking communicators.
    BlockInJoin,
    RefuseToJoin,
    /// Calls are refused.
    RefuseCalls,
    /// What is under way never ends.
    NeverEnd,
    /// A remote error is found after a call.
    RemoteError,
    /// The abort blocks, as it does while a graph still holds the kernels.
    BlockInAbort,
}

const ALL: [Does; 8] = [
    Does::Work,
    Does::NeverJoin,
    Does::BlockInJoin,
    Does::RefuseToJoin,
    Does::RefuseCalls,
    Does::NeverEnd,
    Does::RemoteError,
    Does::BlockInAbort,
];

const REFUSED: Code = Code(5);
const REMOTE: Code = Code(6);

/// What a handle points to, for good.
struct StandIn {
    does: Does,
    /// Between two groups.
    calls: Mutex<Vec<String>>,
}

impl StandIn {
    fn of(handle: Handle) -> &'static Self {
        // SAFETY: every handle here is a leaked box of `init`.
        unsafe { &*handle.cast::<Self>() }
    }

    fn note(handle: Handle, call: String) -> Code {
        let this = Self::of(handle);
        this.calls.lock().expect("no panic").push(call);
        if this.does == Does::RefuseCalls { REFUSED } else { Code::SUCCESS }
    }
}

unsafe extern "C" fn get_version(version: *mut c_int) -> Code {
    unsafe { *version = 22_800 };
    Code::SUCCESS
}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> Code {
    unsafe { *id = UniqueId([7; 128]) };
    Code::SUCCESS
}

unsafe extern "C" fn init(
    handle: *mut Handle,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    _: *mut Config,
) -> Code {
    let does = ALL[id.0[0] as usize];
    if does == Does::RefuseToJoin {
        return REFUSED;
    }
    if does == Does::BlockInJoin {
        std::thread::sleep(Duration::from_secs(600));
    }
    let calls = Mutex::new(vec![format!("init {rank} of {world}")]);
    unsafe { *handle = Box::into_raw(Box::new(StandIn { does, calls })).cast() };
    Code::IN_PROGRESS
}

unsafe extern "C" fn async_error(handle: Handle, state: *mut Code) -> Code {
    let this = StandIn::of(handle);
    let called = this.calls.lock().expect("no panic").len() > 1;
    let code = match this.does {
        Does::NeverJoin => Code::IN_PROGRESS,
        Does::NeverEnd if called => Code::IN_PROGRESS,
        Does::RemoteError if called => REMOTE,
        _ => Code::SUCCESS,
    };
    unsafe { *state = code };
    Code::SUCCESS
}

unsafe extern "C" fn finalize(handle: Handle) -> Code {
    StandIn::note(handle, "finalize".into())
}

unsafe extern "C" fn destroy(handle: Handle) -> Code {
    StandIn::note(handle, "destroy".into())
}

unsafe extern "C" fn abort(handle: Handle) -> Code {
    let code = StandIn::note(handle, "abort".into());
    if StandIn::of(handle).does == Does::BlockInAbort {
        std::thread::sleep(Duration::from_secs(600));
    }
    code
}

unsafe extern "C" fn error_string(code: Code) -> *const c_char {
    match code {
        REFUSED => c"invalid usage".as_ptr(),
        REMOTE => c"remote process exited".as_ptr(),
        _ => c"success".as_ptr(),
    }
}

unsafe extern "C" fn last_error(handle: Handle) -> *const c_char {
    if handle.is_null() { std::ptr::null() } else { c"said by NCCL".as_ptr() }
}

unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    handle: Handle,
    stream: Stream,
) -> Code {
    let [from, to, stream] = [from as usize, to as usize, stream as usize];
    StandIn::note(handle, format!("all_gather {from} {to} {count} of {dtype} on {stream}"))
}

unsafe extern "C" fn reduce_scatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    handle: Handle,
    _: Stream,
) -> Code {
    let [from, to] = [from as usize, to as usize];
    StandIn::note(handle, format!("reduce_scatter {from} {to} {count} of {dtype} by {op}"))
}

unsafe extern "C" fn send(
    from: *const c_void,
    count: usize,
    _: c_int,
    peer: c_int,
    handle: Handle,
    _: Stream,
) -> Code {
    StandIn::note(handle, format!("send {} {count} to {peer}", from as usize))
}

unsafe extern "C" fn receive(
    to: *mut c_void,
    count: usize,
    _: c_int,
    peer: c_int,
    handle: Handle,
    _: Stream,
) -> Code {
    StandIn::note(handle, format!("receive {} {count} of {peer}", to as usize))
}

unsafe extern "C" fn group() -> Code {
    Code::SUCCESS
}

const API: Api = Api {
    get_version,
    get_unique_id,
    init,
    async_error,
    finalize,
    destroy,
    abort,
    error_string,
    last_error,
    all_gather,
    reduce_scatter,
    send,
    receive,
    group_start: group,
    group_end: group,
};

fn join(does: Does) -> Result<Comm> {
    let mut id = UniqueId([0; 128]);
    id.0[0] = does as u8;
    Comm::init(&API, id, 1, 2, SHORT, false, Arc::new(|| {}))
}

/// Calls of a communicator so far, without those of joining.
fn calls(comm: &Comm) -> Vec<String> {
    let mut found = Vec::new();
    let look = comm.group("a look", |_, handle| {
        found = StandIn::of(handle).calls.lock().expect("no panic")[1..].to_vec();
        Code::SUCCESS
    });
    look.expect("open");
    found
}

fn gather(comm: &Comm) -> Result<()> {
    comm.group("all_gather", |api, handle| {
        let target = Target { api, handle, stream: 9 as Stream };
        // SAFETY: the stand-in follows no address.
        unsafe { target.all_gather(Ends { from: 16 as Handle, to: 32 as Handle, bytes: 12 }) }
    })
}

fn said(result: Result<()>) -> String {
    let error = result.expect_err("an error");
    assert!(matches!(error, Error::Exchange { rank: 1, .. }), "{error:?}");
    error.to_string()
}

#[test]
fn exchanges_are_nccls_calls() {
    let comm = join(Does::Work).expect("joined");
    gather(&comm).expect("called");
    comm.group("the others", |api, handle| {
        let target = Target { api, handle, stream: std::ptr::null_mut() };
        let ends = Ends { from: 1000 as Handle, to: 2000 as Handle, bytes: 8 };
        let bf16 = (library::sum_dtype(Dtype::Bf16).expect("summed"), 2);
        // SAFETY: as above.
        unsafe { super::worst([target.all_to_all(ends, 2), target.reduce_scatter(ends, bf16)]) }
    })
    .expect("called");
    let want = [
        "all_gather 16 32 12 of 1 on 9",
        "send 1000 8 to 0",
        "receive 2000 8 of 0",
        "send 1008 8 to 1",
        "receive 2008 8 of 1",
        "reduce_scatter 1000 2000 4 of 9 by 0",
    ];
    assert_eq!(calls(&comm), want);
    comm.wait(|| Ok(true)).expect("idle");
}

#[test]
fn no_deadline_is_none() {
    let id = UniqueId([Does::Work as u8; 128]);
    let comm = Comm::init(&API, id, 1, 2, Duration::MAX, false, Arc::new(|| {})).expect("joined");
    gather(&comm).expect("called");
    let looks = std::cell::Cell::new(0);
    let is_idle = || {
        looks.set(looks.get() + 1);
        Ok(looks.get() > 3)
    };
    comm.wait(is_idle).expect("idle in the end");
}

#[test]
fn a_rank_that_never_comes_is_an_error_in_time() {
    for does in [Does::NeverJoin, Does::BlockInJoin] {
        let begin = Instant::now();
        let text = said(join(does).map(drop));
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        assert!(text.contains("did not all come within 200ms"), "{text}");
    }
    let text = said(join(Does::RefuseToJoin).map(drop));
    assert!(text.contains("joining the group between the ranks failed: invalid usage (5)"), "{text}");
}

#[test]
fn what_fails_breaks_the_group_for_good() {
    for (does, why) in [
        (Does::RefuseCalls, "invalid usage (5): said by NCCL"),
        (Does::NeverEnd, "did not all come within 200ms"),
        (Does::RemoteError, "remote process exited (6): said by NCCL"),
    ] {
        let comm = Arc::new(join(does).expect("joined"));
        let graph = Alive(comm.clone());
        graph.check().expect("nothing happened yet");
        let begin = Instant::now();
        for _ in 0..2 {
            let text = said(gather(&comm));
            assert!(text.contains(why), "{does:?}: {text}");
        }
        assert!(said(graph.check()).contains(why), "a graph of it is not replayed");
        assert!(said(comm.wait(|| Ok(false))).contains(why));
        drop(comm);
        assert!(begin.elapsed() < SOON);
    }
}

#[test]
fn a_stream_that_never_ends_is_an_error_in_time_and_is_aborted() {
    for does in [Does::Work, Does::BlockInAbort] {
        let comm = join(does).expect("joined");
        gather(&comm).expect("called");
        let begin = Instant::now();
        let text = said(comm.wait(|| Ok(false)));
        assert!(text.contains("waiting for an exchange"), "{text}");
        assert!(begin.elapsed() < SOON);
        assert!(said(gather(&comm)).contains("within 200ms"), "it is of no use any more");
    }
    // The stream's own error is passed on.
    let comm = join(Does::Work).expect("joined");
    let lost = || Err(Error::Cuda { what: "to ask the stream", detail: "gone".into() });
    assert!(matches!(comm.wait(lost), Err(Error::Cuda { .. })));
}

#[test]
fn codes_have_no_sum() {
    assert!(matches!(library::sum_dtype(Dtype::E4m3), Err(Error::DtypeUnsupported { .. })));
}

/// A library of C, with the functions that a test names.
fn library_of(name: &str, functions: &[&str]) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("wgpu-mla-nccl-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (source, library) = (folder.join("stand_in.c"), folder.join("libnccl.so.2"));
    let text: String = functions.iter().map(|name| format!("int {name}(void) {{ return 0; }}\n")).collect();
    std::fs::write(&source, text).expect("written");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(made.expect("a C compiler, which Rust links with too").success());
    library
}

#[test]
#[cfg(target_os = "linux")]
fn a_library_is_loaded_if_it_has_every_function() {
    const FUNCTIONS: [&str; 15] = [
        "ncclGetVersion",
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "ncclCommGetAsyncError",
        "ncclCommFinalize",
        "ncclCommDestroy",
        "ncclCommAbort",
        "ncclGetErrorString",
        "ncclGetLastError",
        "ncclAllGather",
        "ncclReduceScatter",
        "ncclSend",
        "ncclRecv",
        "ncclGroupStart",
        "ncclGroupEnd",
    ];
    let [whole, old] = [("whole", &FUNCTIONS[..]), ("old", &FUNCTIONS[..4])].map(|(name, has)| {
        let library = library_of(name, has);
        let loaded = Api::load(library.as_os_str());
        std::fs::remove_dir_all(library.parent().expect("a folder")).expect("removed");
        loaded
    });
    whole.expect("a whole library");
    let old = old.expect_err("an old one");
    assert_eq!(old, "the library has no ncclCommFinalize");
    let none = Api::load("/nowhere/libnccl.so.2".as_ref()).expect_err("none");
    let text = Error::NoNccl { detail: none }.to_string();
    assert!(text.starts_with("no NCCL: ") && text.contains("put its folder on LD_LIBRARY_PATH"), "{text}");
}
