//! Processes with guest RAM in them.
//!
//! The test maps memory and writes to it, then forks: the child has the same memory at the same addresses, keeps it and does
//! nothing. What the test still sees in its own mapping is what must be captured.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockd::capture::{Base, Mapping, Request};
use overlaybd::{FileSource, Layer, LayerInfo, LayerWriter, ParentCheck, Stack, Uuid};

pub const PAGE: usize = 4096;

/// Memory of this process.
pub struct Memory {
    address: *mut u8,
    len: usize,
}

// SAFETY: it is plain memory, which only its owner reaches.
unsafe impl Send for Memory {}
// SAFETY: and writing to it takes it whole.
unsafe impl Sync for Memory {}

impl Memory {
    /// A private mapping of a part of a file.
    pub fn of_file(file: &File, offset: u64, len: usize) -> Self {
        Self::map(libc::MAP_PRIVATE, file.as_raw_fd(), offset, len)
    }

    /// A shared mapping of a part of a file.
    pub fn shared(file: &File, len: usize) -> Self {
        Self::map(libc::MAP_SHARED, file.as_raw_fd(), 0, len)
    }

    pub fn anonymous(len: usize) -> Self {
        Self::map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0, len)
    }

    fn map(flags: i32, fd: i32, offset: u64, len: usize) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, where the kernel likes.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, offset as i64) };
        assert_ne!(address, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { address: address.cast(), len }
    }

    /// Advises the kernel about a part; false if it knows no such advice.
    pub fn advise(&mut self, range: std::ops::Range<usize>, advice: i32) -> bool {
        assert!(range.end <= self.len);
        // SAFETY: within the mapping, which is plain memory however it is advised.
        unsafe { libc::madvise(self.address.add(range.start).cast(), range.len(), advice) == 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, and of no other owner.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }

    pub fn page_mut(&mut self, page: usize) -> &mut [u8] {
        &mut self.bytes_mut()[page * PAGE..][..PAGE]
    }

    pub fn at(&self, offset: u64) -> Mapping {
        Mapping { address: self.address as u64, length: self.len as u64, offset }
    }

    /// The sum of a field of `smaps` (in KiB) over this memory.
    pub fn smaps(&self, field: &str) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let (start, end) = (self.address as u64, self.address as u64 + self.len as u64);
        let mut inside = false;
        let mut sum = 0;
        for line in text.lines() {
            if let Some((from, _)) = line.split_once('-').filter(|_| !line.contains("kB")) {
                inside = u64::from_str_radix(from, 16).is_ok_and(|from| from >= start && from < end);
            } else if let Some(value) =
                line.strip_prefix(field).and_then(|rest| rest.strip_prefix(':')).filter(|_| inside)
            {
                sum += value.trim().trim_end_matches(" kB").parse::<u64>().expect("KiB");
            }
        }
        sum
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: its own mapping, no longer borrowed.
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}

/// Held while a child may have copies of this process's open files.
static FORKING: Mutex<()> = Mutex::new(());

/// Keeps other tests from forking, and so from keeping files open, until it is dropped.
pub fn alone() -> MutexGuard<'static, ()> {
    FORKING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process with this one's memory, stopped.
pub struct Guest(pub i32);

impl Guest {
    /// Forks; if `user` is given, the child becomes that user.
    pub fn fork(user: Option<u32>) -> Self {
        Self::fork_alone(user, &alone())
    }

    /// The same for who has the guard already.
    pub fn fork_alone(user: Option<u32>, _alone: &MutexGuard<'_, ()>) -> Self {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().expect("sockets");
        // SAFETY: the child calls nothing but system calls.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", std::io::Error::last_os_error());
        if pid == 0 {
            // SAFETY: plain system calls; the child never returns.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if let Some(user) = user {
                    libc::syscall(libc::SYS_setresuid, user, user, user);
                }
                libc::dup2(writer.as_raw_fd(), 0);
                libc::close_range(1, u32::MAX, 0);
                libc::write(0, [1u8].as_ptr().cast(), 1);
                loop {
                    libc::pause();
                }
            }
        }
        std::io::Read::read_exact(&mut &reader, &mut [0]).expect("the child is ready");
        Self(pid)
    }

    pub fn pid(&self) -> u32 {
        self.0 as u32
    }

    pub fn kill(pid: i32) {
        // SAFETY: our own child.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        Self::kill(self.0);
    }
}

/// A layer file with these bytes, without what is zero.
pub fn layer_of(bytes: &[u8]) -> Arc<Layer> {
    let info =
        LayerInfo { virtual_size: bytes.len() as u64, uuid: Uuid::random().expect("uuid"), ..LayerInfo::default() };
    let file = tempfile::tempfile().expect("file");
    let mut writer = LayerWriter::new(file, info).expect("header");
    for (i, page) in bytes.chunks(PAGE).enumerate().filter(|(_, page)| page.iter().any(|&byte| byte != 0)) {
        writer.data((i * PAGE) as u64, page).expect("page");
    }
    let (file, _) = writer.finish().expect("layer");
    Arc::new(Layer::open(Arc::new(FileSource::new(file).expect("file"))).expect("layer"))
}

pub fn open(path: &std::path::Path) -> Arc<Layer> {
    let file = File::open(path).expect("the layer");
    Arc::new(Layer::open(Arc::new(FileSource::new(file).expect("file"))).expect("a layer"))
}

pub fn stack(layers: &[Arc<Layer>]) -> Arc<Stack> {
    Arc::new(Stack::open(layers.to_vec(), ParentCheck::Enforce).expect("a stack"))
}

pub fn base(layers: &[Arc<Layer>]) -> Option<Base> {
    Some(Base { stack: stack(layers), mapped: None })
}

pub fn read(layers: &[Arc<Layer>]) -> Vec<u8> {
    let stack = stack(layers);
    let mut bytes = vec![0; stack.virtual_size() as usize];
    assert_eq!(stack.read_at(&mut bytes, 0).expect("readable"), bytes.len());
    bytes
}

pub fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().expect("file");
    std::io::Write::write_all(&mut file, bytes).expect("written");
    file
}

pub fn request(guest: &Guest, mappings: &[Mapping], output: std::path::PathBuf, size: usize) -> Request {
    Request {
        pid: guest.pid(),
        start_time: None,
        mappings: mappings.to_vec(),
        base: None,
        output,
        size: size as u64,
        compare: true,
        digest: false,
        durable: false,
        method: None,
    }
}

/// A generator of repeatable noise.
pub struct Noise(pub u64);

impl Noise {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_ne_bytes()[..chunk.len()]);
        }
    }
}

/// Compares without printing megabytes.
pub fn assert_same(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    for (i, (a, b)) in found.chunks(PAGE).zip(expected.chunks(PAGE)).enumerate() {
        assert!(a == b, "page {i} differs: {:?}… is not {:?}…", &a[..8], &b[..8]);
    }
}
