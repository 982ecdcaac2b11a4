//! The kernel's ublk interface (`include/uapi/linux/ublk_cmd.h`), for the crate `libublk`.
//!
//! The crate of this name on the registry makes these bindings when it is built, for which every machine that builds this
//! project would need libclang. They are the same on every architecture, so here they are made already:
//! `ublk_cmd.rs` is what bindgen 0.69 makes of version 0.1.2, without its layout tests. `[patch.crates-io]` in the workspace
//! puts this in its place.

#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, clippy::all)]

include!("ublk_cmd.rs");

/// The registration of a buffer in the form of a submission's address field.
pub fn ublk_auto_buf_reg_to_sqe_addr(buf: &ublk_auto_buf_reg) -> u64 {
    u64::from(buf.index) | u64::from(buf.flags) << 16 | u64::from(buf.reserved0) << 24 | u64::from(buf.reserved1) << 32
}

/// The opposite.
pub fn ublk_sqe_addr_to_auto_buf_reg(addr: u64) -> ublk_auto_buf_reg {
    ublk_auto_buf_reg { index: addr as u16, flags: (addr >> 16) as u8, ..Default::default() }
}
