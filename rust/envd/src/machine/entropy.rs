//! The kernel's random numbers: two guests started from one snapshot have the same generator state until it is reseeded.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;

/// `_IOW('R', 0x03, int[2])`, linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `_IO('R', 0x07)`, linux/random.h: mix the pool into the generator now rather than within minutes.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Most bytes one call takes; more adds nothing.
pub const MAX_ENTROPY: usize = 512;

#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    size: libc::c_int,
    bytes: [u8; MAX_ENTROPY],
}

/// The kernel's pool.
#[derive(Debug)]
pub struct Pool(File);

impl Pool {
    /// # Errors
    /// Those of opening /dev/urandom.
    pub fn open() -> io::Result<Self> {
        File::options().write(true).open("/dev/urandom").map(Self)
    }

    /// Credits `entropy` to the pool (the first 512 bytes) and reseeds the generator from it.
    ///
    /// # Errors
    /// Those of the two ioctls.
    pub fn reseed(&self, entropy: &[u8]) -> io::Result<()> {
        let entropy = &entropy[..entropy.len().min(MAX_ENTROPY)];
        let size = libc::c_int::try_from(entropy.len()).map_err(io::Error::other)?;
        let mut info = PoolInfo { entropy_bits: size * 8, size, bytes: [0; MAX_ENTROPY] };
        info.bytes[..entropy.len()].copy_from_slice(entropy);
        let device = self.0.as_raw_fd();
        // SAFETY: `info` has the layout of rand_pool_info, its `size` is at most the array's length, and it outlives the call.
        Errno::result(unsafe { libc::ioctl(device, RNDADDENTROPY as _, &info) })?;
        // SAFETY: takes no argument.
        Errno::result(unsafe { libc::ioctl(device, RNDRESEEDCRNG as _) })?;
        Ok(())
    }
}
